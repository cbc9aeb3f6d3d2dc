"""Continuous batching over a paged cache that may be too small. Pure.

Every active sequence takes part in every step, up to `max_batch` of them. Rules when blocks are
short:

- Blocks go to the earliest arrived first; when one lacks a block, the latest arrived active
  sequence is preempted, so the earliest always finishes.
- A sequence is admitted only if a reserve is left for the growth of everybody. The reserve is
  raised fourfold with each preemption that the request has suffered, up to the worst case of all:
  then nobody can be preempted, so a request is preempted a bounded number of times.
- A ready sequence that does not fit lets at most `MAX_BYPASSES` later ones pass, so a short one
  behind a long one is served soon, and the long one is not starved by short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.errors import InvariantError
from core.ids import AttemptId, BlockHash
from core.paged import PagedAllocator

MAX_BYPASSES = 8

RESERVE_GROWTH = 4


@dataclass(slots=True)
class BatchedSequence:
    """What batching needs to know of an attempt.

    `num_positions` must have a block before its next step, `max_blocks` bounds what it can ever
    need. `arrival` orders requests by age and survives preemption, as does `num_preempted`.
    """

    attempt: AttemptId
    arrival: int
    num_preempted: int
    num_positions: int
    max_blocks: int
    table: list[int] = field(default_factory=list)
    num_bypasses: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs in the next step (tables cover it), and who had to give way (tables empty)."""

    run: tuple[BatchedSequence, ...]
    preempted: tuple[BatchedSequence, ...]


class DecodeBatcher:
    """Shares the blocks of `allocator` among the sequences it has admitted."""

    def __init__(self, allocator: PagedAllocator, *, max_batch: int, block_size: int) -> None:
        self.allocator = allocator
        self.max_batch = max_batch
        self._block_size = block_size
        self._active: dict[AttemptId, BatchedSequence] = {}

    @property
    def num_active(self) -> int:
        """Sequences admitted and not removed."""
        return len(self._active)

    def is_active(self, attempt: AttemptId) -> bool:
        """Whether the attempt was admitted and not removed."""
        return attempt in self._active

    def blocks_for(self, num_positions: int) -> int:
        """Return how many blocks hold `num_positions` tokens."""
        return -(-num_positions // self._block_size)

    def admit(
        self,
        ready: Iterable[BatchedSequence],
        reusable: Callable[[BatchedSequence], list[BlockHash]],
    ) -> list[tuple[BatchedSequence, int]]:
        """Take in ready sequences; each with the number of blocks found in the paged cache.

        `reusable` gives the hashes of a sequence's blocks that may be taken from there.
        """
        admitted: list[tuple[BatchedSequence, int]] = []
        passed: list[BatchedSequence] = []
        for sequence in sorted(ready, key=lambda s: s.arrival):
            if len(self._active) >= self.max_batch:
                break
            num_found = self._take(sequence, reusable(sequence))
            if num_found is not None:
                self._active[sequence.attempt] = sequence
                admitted.append((sequence, num_found))
                for earlier in passed:
                    earlier.num_bypasses += 1
            else:
                passed.append(sequence)
            if any(earlier.num_bypasses >= MAX_BYPASSES for earlier in passed):
                break
        return admitted

    def _take(self, sequence: BatchedSequence, hashes: list[BlockHash]) -> int | None:
        """Fill the table of a sequence; `None`, and no change, when it has to wait."""
        found = self.allocator.match(hashes)
        self.allocator.acquire(found)
        count = self.blocks_for(sequence.num_positions) - len(found)
        blocks = None
        if count + self._reserve(sequence) <= self.allocator.num_available:
            blocks = self.allocator.allocate(count)
        if blocks is None:
            self.allocator.release(found)
            return None
        sequence.table = found + blocks
        return len(found)

    def _reserve(self, newcomer: BatchedSequence) -> int:
        """Return the blocks to leave for growth when `newcomer` is admitted."""
        growth = newcomer.max_blocks - self.blocks_for(newcomer.num_positions)
        growth += sum(s.max_blocks - len(s.table) for s in self._active.values())
        wanted: int = (len(self._active) + 1) * RESERVE_GROWTH**newcomer.num_preempted
        return min(growth, wanted)

    def plan(self, joined: Iterable[BatchedSequence], *, blocks_coming: bool) -> StepPlan:
        """Give each of `joined` (active and loaded) the blocks of its next step.

        `blocks_coming` says that blocks will be given back without a preemption (by a copy that
        ends soon): who lacks one then sits out instead of displacing another.
        """
        waiting = sorted(joined, key=lambda s: s.arrival)
        run: list[BatchedSequence] = []
        preempted: list[BatchedSequence] = []
        while waiting:
            sequence = waiting[0]
            count = self.blocks_for(sequence.num_positions) - len(sequence.table)
            blocks = self.allocator.allocate(count) if count > 0 else []
            if blocks is not None:
                sequence.table += blocks
                run.append(waiting.pop(0))
            elif blocks_coming or not (run or waiting[1:]):
                waiting.pop(0)
            else:
                # The later ones are still in `waiting`, so the last of them goes before any in
                # `run`; if there are none, this one is the latest itself.
                victim = waiting.pop()
                self.remove(victim)
                preempted.append(victim)
        return StepPlan(tuple(run), tuple(preempted))

    def remove(self, sequence: BatchedSequence) -> None:
        """Let a sequence go and give its blocks back."""
        if self._active.pop(sequence.attempt, None) is None:
            raise InvariantError(f"{sequence.attempt} is not in the batch")
        self.allocator.release(sequence.table)
        sequence.table = []

    def validate(self, extra_holds: Iterable[int]) -> None:
        """Re-derive the block counts; `extra_holds` are references held outside the batch."""
        for sequence in self._active.values():
            if len(sequence.table) > sequence.max_blocks:
                raise InvariantError(f"{sequence.attempt} has outgrown its bound")
        tables = [s.table for s in self._active.values()]
        self.allocator.validate([*tables, list(extra_holds)])
