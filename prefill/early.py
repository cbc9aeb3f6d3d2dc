"""What comes out of order: slots before their request, requests after a newer attempt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.ids import AttemptId, RequestId
from prefill.events import DecodeSlotsReceived


@dataclass(slots=True)
class _Waiting:
    expires_s: float
    events: list[DecodeSlotsReceived]


class EarlySlots:
    """At most `max_attempts` attempts' slots, each kept `ttl_s` from its first message on."""

    def __init__(self, *, max_attempts: int, ttl_s: float) -> None:
        self._max_attempts, self._ttl_s = max_attempts, ttl_s
        self._waiting: OrderedDict[AttemptId, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: DecodeSlotsReceived, now_s: float) -> list[DecodeSlotsReceived]:
        """Keep one message; return those that had to go for it."""
        waiting = self._waiting.get(event.attempt)
        if waiting is None:
            waiting = self._waiting[event.attempt] = _Waiting(now_s + self._ttl_s, [])
        waiting.events.append(event)
        if len(self._waiting) <= self._max_attempts:
            return []
        return self._waiting.popitem(last=False)[1].events

    def take(self, wanted: Callable[[DecodeSlotsReceived], bool]) -> list[DecodeSlotsReceived]:
        """Remove and return the messages of attempts of which a message is `wanted`."""
        return self._pop([a for a, w in self._waiting.items() if any(map(wanted, w.events))])

    def take_attempt(self, attempt: AttemptId) -> list[DecodeSlotsReceived]:
        """Remove and return the messages of one attempt."""
        return self._pop([attempt] if attempt in self._waiting else [])

    def expire(self, now_s: float) -> list[DecodeSlotsReceived]:
        """Remove and return what waited too long."""
        return self._pop([a for a, w in self._waiting.items() if w.expires_s <= now_s])

    def _pop(self, attempts: Iterable[AttemptId]) -> list[DecodeSlotsReceived]:
        return [event for attempt in attempts for event in self._waiting.pop(attempt).events]


class SeenAttempts:
    """The newest attempt seen of each of the latest `max_requests` requests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._newest: OrderedDict[RequestId, int] = OrderedDict()

    def add(self, name: AttemptId) -> None:
        """Remember an attempt; an older one than seen changes nothing."""
        self._newest[name.request] = max(name.attempt, self._newest.pop(name.request, 0))
        if len(self._newest) > self._max_requests:
            self._newest.popitem(last=False)

    def __contains__(self, name: AttemptId) -> bool:
        """Whether this attempt or a newer one of its request was seen."""
        return name.attempt <= self._newest.get(name.request, 0)
