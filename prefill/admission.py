"""Who waits for room in the paged cache, and what the cache keeps for whom. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

from core.errors import InvariantError
from core.ids import BlockHash
from core.paged import PagedAllocator
from prefill.attempt import Attempt, Phase


class Admission:
    """The queue in front of the paged cache, and the cache's bookkeeping.

    An attempt gets all its blocks at once, in order of (priority, arrival): who does not fit holds
    up those behind it, so that no stream of small requests starves a large one. Who waits for a
    block that another attempt is making holds up nobody.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._allocator = PagedAllocator(num_blocks)
        self._block_size = block_size
        self._queue: list[Attempt] = []
        self._making: Counter[BlockHash] = Counter()
        self._due = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the paged cache."""
        return self._allocator.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return self._allocator.num_available

    @property
    def num_queued(self) -> int:
        """Attempts that wait."""
        return len(self._queue)

    def enqueue(self, attempt: Attempt) -> None:
        """Let an attempt wait."""
        bisect.insort(self._queue, attempt, key=lambda a: a.order)
        self._due = True

    def leave(self, attempt: Attempt) -> None:
        """Note that an attempt ends: it waits no more, and makes no more blocks."""
        if attempt.phase is Phase.QUEUED:
            self._queue.remove(attempt)
        else:
            self._made(attempt.unpublished)
        self._due = True

    def admit(self, now_s: float) -> list[Attempt]:
        """Give blocks to those whose turn it is.

        They are loading from now on; what the cache has of their prefix counts as computed.
        """
        if not self._due or not self._queue:
            return []
        self._due = False
        admitted: list[Attempt] = []
        for attempt in self._queue:
            local = self._allocator.match(attempt.reusable)
            missing = attempt.reusable[len(local) :]
            if missing and missing[0] in self._making:
                continue
            self._allocator.acquire(local)
            fresh = self._allocator.allocate(attempt.num_blocks - len(local))
            if fresh is None:
                self._allocator.release(local)
                break
            attempt.block_ids = local + fresh
            attempt.num_local_blocks = attempt.num_published = len(local)
            attempt.num_computed = attempt.num_cached_tokens
            attempt.admitted_s = now_s
            attempt.phase = Phase.LOADING
            self._making.update(attempt.unpublished)
            admitted.append(attempt)
        self._queue = [attempt for attempt in self._queue if attempt.phase is Phase.QUEUED]
        return admitted

    def publish(self, attempt: Attempt) -> None:
        """Let the cache find every full block of the attempt that is complete."""
        num_complete = attempt.num_computed // self._block_size
        for index in range(attempt.num_published, num_complete):
            self._allocator.publish(attempt.block_ids[index], attempt.work.block_hashes[index])
        self._made(attempt.work.block_hashes[attempt.num_published : num_complete])
        attempt.num_published = num_complete
        self._due = True

    def give_back(self, attempt: Attempt) -> None:
        """Take back the blocks of an attempt that nothing touches any more."""
        self._allocator.release(attempt.block_ids)
        self._due = True

    def _made(self, block_hashes: Iterable[BlockHash]) -> None:
        """One attempt less is about to make each of these."""
        for block_hash in block_hashes:
            self._making[block_hash] -= 1
            if not self._making[block_hash]:
                del self._making[block_hash]

    def validate(self, attempts: Iterable[Attempt]) -> None:
        """Re-derive the bookkeeping from all attempts. Raises `InvariantError`."""
        known = list(attempts)
        self._allocator.validate([attempt.block_ids for attempt in known])
        queued = [attempt for attempt in known if attempt.phase is Phase.QUEUED]
        if sorted(queued, key=lambda a: a.order) != self._queue:
            raise InvariantError("the queue does not hold the queued attempts in order")
        making = [a for a in known if a.phase not in (Phase.QUEUED, Phase.ENDING)]
        if Counter(h for attempt in making for h in attempt.unpublished) != self._making:
            raise InvariantError("the blocks that are being made are not those missing")
        for attempt in known:
            if len(attempt.block_ids) not in (0, attempt.num_blocks):
                raise InvariantError(f"{attempt.attempt} holds {len(attempt.block_ids)} blocks")
            if attempt.num_published * self._block_size > attempt.num_computed:
                raise InvariantError(f"{attempt.attempt} published what is not computed")
