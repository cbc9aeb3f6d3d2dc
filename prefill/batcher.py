"""Cuts queued prompts into chunks. Pure.

Two wishes pull at a chunk's token budget: a long prompt shall not make short ones wait for all of
its chunks, and a stream of short ones shall not keep a long one from ending. So the budget is
shared:

1. The *head*, first by (priority, arrival), is sure of half of the budget.
2. Prompts of its priority or better with less left than the head follow, least left first, with
   the other half.
3. What they do not use is the head's.
4. What the head does not use goes to everybody, in order of (priority, arrival).

Nobody overtakes the head by more than half of a chunk, and as heads finish, everybody becomes head
in order of arrival. Equal prompts are done one after the other, not side by side, which would only
end all of them late.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.batching import Piece
from core.errors import ConfigError, InvariantError
from core.ids import AttemptId


@dataclass(slots=True)
class _Entry:
    """Positions `start ... end - 1` are to be computed; `arrival` numbers the calls of `add`."""

    attempt: AttemptId
    start: int
    end: int
    priority: int
    arrival: int

    @property
    def num_left(self) -> int:
        return self.end - self.start


class PrefillBatcher:
    """The `core.batching.ChunkBatcher` of prefill: bounds are per chunk."""

    def __init__(self, *, max_chunk_tokens: int, max_chunk_requests: int, block_size: int) -> None:
        if max_chunk_tokens < block_size or max_chunk_requests < 1:
            raise ConfigError(
                f"max_chunk_tokens ({max_chunk_tokens}) must be at least the block size "
                f"({block_size}) and max_chunk_requests ({max_chunk_requests}) at least 1"
            )
        self._max_chunk_tokens = max_chunk_tokens
        self._max_chunk_requests = max_chunk_requests
        self._block_size = block_size
        self._entries: dict[AttemptId, _Entry] = {}
        self._num_added = 0

    @property
    def queued_tokens(self) -> int:
        """Tokens not yet handed out, of all attempts."""
        return sum(entry.num_left for entry in self._entries.values())

    @property
    def attempts(self) -> frozenset[AttemptId]:
        """The attempts that are queued."""
        return frozenset(self._entries)

    def add(self, attempt: AttemptId, *, start: int, end: int, priority: int) -> None:
        """See `core.batching.ChunkBatcher.add`."""
        if attempt in self._entries or not 0 <= start < end:
            raise InvariantError(f"cannot queue positions {start} to {end} of attempt {attempt}")
        self._num_added += 1
        self._entries[attempt] = _Entry(attempt, start, end, priority, self._num_added)

    def remove(self, attempt: AttemptId) -> None:
        """See `core.batching.ChunkBatcher.remove`."""
        self._entries.pop(attempt, None)

    def next_chunk(self, max_tokens: int) -> tuple[Piece, ...]:
        """See `core.batching.ChunkBatcher.next_chunk`."""
        if not self._entries:
            return ()
        budget = min(max_tokens, self._max_chunk_tokens)
        in_order = sorted(self._entries.values(), key=lambda e: (e.priority, e.arrival))
        head = in_order[0]
        sure = self._fit(head, budget - budget // 2) or self._fit(head, budget)
        shorter = [
            e for e in in_order if e.priority <= head.priority and e.num_left < head.num_left
        ]
        shorter.sort(key=lambda e: (e.num_left, e.arrival))
        taken: dict[AttemptId, int] = {head.attempt: sure}
        self._share(shorter, budget - sure, taken)
        taken[head.attempt] = self._fit(head, budget - sum(taken.values()) + sure)
        self._share(in_order, budget - sum(taken.values()), taken)
        return tuple(
            self._take(self._entries[attempt], num_tokens)
            for attempt, num_tokens in taken.items()
            if num_tokens
        )

    def _share(self, entries: list[_Entry], budget: int, taken: dict[AttemptId, int]) -> None:
        """Give `budget` tokens to `entries` that have none, in order."""
        for entry in entries:
            if budget == 0 or len(taken) == self._max_chunk_requests:
                return
            num_tokens = 0 if entry.attempt in taken else self._fit(entry, budget)
            if num_tokens:
                taken[entry.attempt] = num_tokens
                budget -= num_tokens

    def _fit(self, entry: _Entry, budget: int) -> int:
        """Tokens of the entry's next piece within `budget`; 0 when no allowed piece fits."""
        if entry.num_left <= budget:
            return entry.num_left
        end = (entry.start + budget) // self._block_size * self._block_size
        return max(0, end - entry.start)

    def _take(self, entry: _Entry, num_tokens: int) -> Piece:
        last = num_tokens == entry.num_left
        piece = Piece(entry.attempt, entry.start, num_tokens, last)
        entry.start += num_tokens
        if last:
            del self._entries[entry.attempt]
        return piece
