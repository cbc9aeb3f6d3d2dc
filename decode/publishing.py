"""Blocks on their way from the paged cache back into the pool. Pure.

Each queued block holds a reference in the paged allocator until its copy has ended, so its bytes
outlive the sequence that made it. One batch is under way at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from core.errors import InvariantError
from core.ids import AttemptId, BlockHash
from core.paged import PagedAllocator
from decode.events import BlockToPublish, PublishBlocks

MAX_PUBLISH_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class _Queued:
    attempt: AttemptId
    block: BlockToPublish


class PublishQueue:
    """First in, first out; bounded by the number of blocks of `allocator`."""

    def __init__(self, allocator: PagedAllocator) -> None:
        self.num_committed = 0
        self._allocator = allocator
        self._queue: deque[_Queued] = deque()
        self._under_way: tuple[_Queued, ...] = ()
        self._next_id = 1

    @property
    def held_blocks(self) -> list[int]:
        """One entry per reference that this queue holds."""
        return [q.block.block_id for q in (*self._under_way, *self._queue)]

    def owners(self) -> set[AttemptId]:
        """Return the attempts whose blocks are still on their way."""
        return {q.attempt for q in (*self._under_way, *self._queue)}

    def add(self, attempt: AttemptId, block_hash: BlockHash, block_id: int) -> None:
        """Queue a complete block that the attempt holds now."""
        self._allocator.acquire([block_id])
        self._queue.append(_Queued(attempt, BlockToPublish(block_hash, block_id)))

    def next_batch(self) -> PublishBlocks | None:
        """Return the next batch if none is under way and there is one."""
        if self._under_way or not self._queue:
            return None
        count = min(MAX_PUBLISH_BLOCKS, len(self._queue))
        self._under_way = tuple(self._queue.popleft() for _ in range(count))
        return PublishBlocks(self._next_id, tuple(q.block for q in self._under_way))

    def end(self, publish_id: int, num_committed: int) -> None:
        """The batch under way has ended, well or not."""
        if not self._under_way or publish_id != self._next_id:
            raise InvariantError(f"publication {publish_id} is not under way")
        self._next_id += 1
        self.num_committed += num_committed
        self._allocator.release([q.block.block_id for q in self._under_way])
        self._under_way = ()

    def drop_queued(self) -> None:
        """Forget what is not under way: there is no pool to take it."""
        self._allocator.release([q.block.block_id for q in self._queue])
        self._queue.clear()
