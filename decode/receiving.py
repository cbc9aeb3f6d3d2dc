"""How the blocks of an attempt's known tokens come to this host's pool node. Pure.

For a decode worker every block comes in the end, because the prefill worker writes those that
nobody else brings. For a coupled worker only a prefix comes, and what does not is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from core.ids import PoolRef
from core.messages.to_gateway import FailureCode
from core.messages.to_pool import AlreadyCommitted, SlotReserved, SlotsExhausted
from core.messages.to_prefill import SlotForBlock
from decode import events as ev
from decode.attempts import Attempt

MAX_LOSSES = 3
"""Lost reservations of one attempt that are made again before it is given up."""

ReceivingEvent = (
    ev.SlotsReserved | ev.ReserveFailed | ev.PrefixFetched | ev.CommitsReceived | ev.LossReceived
)


class Receiving:
    """Works on attempts in `preparing` and `receiving`; keeps nothing of its own.

    `act` takes an action, `fail` gives an attempt up, `pool` tells this host's pool node.
    """

    def __init__(
        self,
        act: Callable[[ev.Action], None],
        fail: Callable[[Attempt, FailureCode, str], None],
        pool: Callable[[], PoolRef | None],
    ) -> None:
        self._pool = pool
        self._act = act
        self._fail = fail

    def start(self, attempt: Attempt) -> None:
        """Order what the attempt needs first. Without a pool node a coupled one reuses nothing."""
        if attempt.coupled:
            if self._pool() is not None and attempt.num_reusable:
                self._fetch(attempt, None, range(attempt.num_reusable))
            return
        expected: set[int] = set()
        for source, numbers in attempt.sources_elsewhere(self._pool()):
            expected.update(numbers)
            self._fetch(attempt, source.pool, numbers)
        self.reserve(attempt, set(range(attempt.num_blocks)) - expected)

    def reserve(self, attempt: Attempt, numbers: Iterable[int]) -> None:
        """Reserve slots for these blocks; with none, only tell the prefill worker to go on."""
        indices = tuple(sorted(numbers))
        attempt.unreserved.difference_update(indices)
        if not indices:
            self._send_slots(attempt, [])
            return
        attempt.busy += 1
        full = [i for i in indices if i < attempt.num_full]
        self._act(
            ev.ReserveSlots(
                attempt.id,
                indices,
                tuple(attempt.hashes[i] for i in full),
                num_private=len(indices) - len(full),
            )
        )

    def _fetch(self, attempt: Attempt, source: PoolRef | None, numbers: range) -> None:
        attempt.busy += 1
        hashes = tuple(attempt.hashes[numbers.start : numbers.stop])
        self._act(ev.FetchPrefix(attempt.id, source, numbers.start, hashes))

    def _send_slots(self, attempt: Attempt, slots: list[SlotForBlock]) -> None:
        if attempt.request.prefill is not None and (slots or not attempt.greeted):
            attempt.greeted = True
            self._act(ev.SendDecodeSlots(attempt.id, attempt.request.prefill, tuple(slots)))

    def handle(self, attempt: Attempt, event: ReceivingEvent, now_s: float) -> None:
        """Take note of what became of the blocks."""
        match event:
            case ev.SlotsReserved():
                self._take_slots(attempt, event, now_s)
            case ev.ReserveFailed(detail=detail):
                self._fail(attempt, FailureCode.POOL_LOST, detail)
            case ev.PrefixFetched():
                attempt.progress_s = now_s
                self._take_prefix(attempt, event)
            case ev.CommitsReceived(blocks=blocks):
                for block in blocks:
                    number = attempt.awaited.pop(block.handle, None)
                    if number is not None:
                        attempt.leased[number] = block
                        attempt.progress_s = now_s
            case ev.LossReceived():
                self._replace(attempt, event)
            case _:
                assert_never(event)

    def _take_slots(self, attempt: Attempt, event: ev.SlotsReserved, now_s: float) -> None:
        slots: list[SlotForBlock] = []
        for number, outcome in zip(event.indices, event.outcomes, strict=True):
            match outcome:
                case SlotReserved(handle=handle):
                    attempt.awaited[handle] = number
                    slots.append(SlotForBlock(number, handle))
                case AlreadyCommitted(block=block):
                    attempt.leased[number] = block
                case SlotsExhausted():
                    attempt.unreserved.add(number)
                case _:
                    assert_never(outcome)
        if len(attempt.unreserved) < len(event.indices):
            attempt.progress_s = now_s
            self._send_slots(attempt, slots)

    def _take_prefix(self, attempt: Attempt, event: ev.PrefixFetched) -> None:
        for number, block in enumerate(event.blocks, start=event.first):
            attempt.leased[number] = block
        missing = range(event.first + len(event.blocks), event.first + event.num_asked)
        if not attempt.coupled:
            if missing:
                self.reserve(attempt, missing)
            return
        # The lease of what is here ended at `missing`; go on where a source has more. A source
        # that was asked for this very block is not asked again.
        for source, numbers in attempt.sources_elsewhere(self._pool()):
            if missing and missing.start in numbers and source.pool not in attempt.asked:
                attempt.asked.append(source.pool)
                self._fetch(attempt, source.pool, range(missing.start, numbers.stop))
                return

    def _replace(self, attempt: Attempt, event: ev.LossReceived) -> None:
        """Reserve lost slots anew: the prefill worker still has the blocks."""
        numbers = [attempt.awaited.pop(h) for h in event.handles if h in attempt.awaited]
        if not numbers:
            return
        attempt.num_losses += 1
        if attempt.num_losses > MAX_LOSSES:
            self._fail(attempt, FailureCode.POOL_LOST, f"{attempt.num_losses} losses of slots")
        else:
            self.reserve(attempt, numbers)
