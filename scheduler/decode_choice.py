"""Which decode worker continues a request: by memory, batch room and predicted TBT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.ids import Incarnation


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode worker as it would be with this request.

    `num_sequences` counts all its requests, this one included; those beyond `max_batch` wait.
    `free_blocks` are neither in use nor promised to others; `needed_blocks` is what this request
    will grow to. `tbt_s` is the predicted step time.
    """

    worker: Incarnation
    num_sequences: int
    max_batch: int
    free_blocks: int
    needed_blocks: int
    tbt_s: float

    @property
    def missing_blocks(self) -> int:
        """Blocks that are short; the worker would have to wait or to preempt."""
        return max(0, self.needed_blocks - self.free_blocks)

    @property
    def num_waiting(self) -> int:
        """Requests that find no place in the batch."""
        return max(0, self.num_sequences - self.max_batch)


def _badness(c: DecodeCandidate) -> tuple[int, int, float, int]:
    return c.missing_blocks, c.num_waiting, c.tbt_s, c.num_sequences


def choose_decode(candidates: Sequence[DecodeCandidate]) -> DecodeCandidate:
    """Choose the fastest worker with memory and batch room; the least overfull one if none has.

    The first wins ties. A request that fits nowhere is placed all the same: what can never fit is
    the worker's to say (`never_fits`), and what does not fit now waits there.
    """
    return min(candidates, key=_badness)
