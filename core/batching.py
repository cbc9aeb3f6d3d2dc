"""What a prefill batcher looks like to whoever is handed one.

The coupled worker's batcher lives in `decode`, which may not import `prefill`; `cluster` and `sim`
hand it a `prefill.batcher.PrefillBatcher` as this Protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from core.ids import AttemptId


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute `num_tokens` tokens of an attempt, from position `start` on.

    `last` says that they reach the end of what was added: the next token is sampled after them.
    Any other piece ends at a block boundary.
    """

    attempt: AttemptId
    start: int
    num_tokens: int
    last: bool

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.num_tokens


class ChunkBatcher(Protocol):
    """A queue of token ranges to compute, cut into chunks. Pure."""

    @property
    def queued_tokens(self) -> int:
        """Tokens not yet handed out, of all attempts."""
        ...

    def add(self, attempt: AttemptId, *, start: int, end: int, priority: int) -> None:
        """Queue positions `start ... end - 1`, at least one. Lower `priority` goes first.

        Raises `InvariantError` when the attempt is queued already.
        """
        ...

    def remove(self, attempt: AttemptId) -> None:
        """Forget an attempt; no error when it is not queued (its last piece was handed out)."""
        ...

    def next_chunk(self, max_tokens: int) -> tuple[Piece, ...]:
        """Take the next chunk out of the queue, at most one piece of each attempt.

        `max_tokens` and the batcher's own bounds limit it. Pieces of at least a block are needed
        for progress: with `max_tokens` under a block size the chunk may be empty though something
        is queued.
        """
        ...
