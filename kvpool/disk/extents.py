"""Which records lie in which extent, and which extent has to go. Pure.

    head (written now) -> full -> sealed -> leaving (nothing alive, waits for readers) -> gone

Room is made by whole extents: FIFO with a second chance. The extent with the fewest live bytes
goes, the oldest of several. What is alive in it is evicted, except that records used since they
were written move to the head, and that an extent which is mostly dead moves as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvpool.disk.records import RecordId, RecordLayout, footer_bytes

_MOSTLY_DEAD = 0.25
"""Share of an extent's records up to which all live ones move: little to copy, nothing lost."""
_MAX_MOVED = 0.5
"""Share of a new head that moved records may take, so that each record is written twice at most."""


@dataclass(slots=True)
class Entry:
    """One record of an extent, dead or alive. `used` since it was written or moved."""

    record: RecordId
    extent: int
    index: int
    is_alive: bool = False
    is_pending: bool = False
    used: bool = False


@dataclass(slots=True)
class Extent:
    """One extent file. `None` in `entries` is a dead record that may hold anything.

    `num_bytes` is what it takes from the size bound. `num_readers` jobs read from it.
    """

    number: int
    capacity: int
    num_bytes: int
    entries: list[Entry | None] = field(default_factory=list)
    num_alive: int = 0
    num_pending: int = 0
    num_readers: int = 0
    num_moving: int = 0
    is_sealed: bool = False
    is_leaving: bool = False
    is_dropping: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it has no room for another record."""
        return len(self.entries) >= self.capacity

    @property
    def is_busy(self) -> bool:
        """Whether some job still reads from it or writes to it."""
        return bool(self.num_readers or self.num_pending or self.num_moving)

    def alive(self) -> list[Entry]:
        """Return the live records, oldest first."""
        return [e for e in self.entries if e is not None and e.is_alive]


class Extents:
    """The extents of a store and their bytes, at most `max_bytes` at all times."""

    def __init__(self, layout: RecordLayout, max_bytes: int, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.extent_bytes = capacity * layout.record_bytes + footer_bytes(capacity)
        self.num_bytes = 0
        self.head: Extent | None = None
        self._by_number: dict[int, Extent] = {}
        self._next_number = 1
        self._room_to_move = 0

    def __getitem__(self, number: int) -> Extent:
        return self._by_number[number]

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, number: int, num_bytes: int, records: Iterable[RecordId | None]) -> Extent:
        """Take an extent that was found on disk."""
        entries = [
            None if record is None else Entry(record, number, index)
            for index, record in enumerate(records)
        ]
        extent = Extent(number, len(entries), num_bytes, entries)
        self._by_number[number] = extent
        self._next_number = max(self._next_number, number + 1)
        self.num_bytes += num_bytes
        return extent

    def open_head(self) -> Extent | None:
        """Begin the next extent; `None` when the bound leaves no room for it."""
        if self.num_bytes + self.extent_bytes > self.max_bytes:
            return None
        self.head = Extent(self._next_number, self.capacity, self.extent_bytes)
        self._by_number[self.head.number] = self.head
        self._next_number += 1
        self.num_bytes += self.extent_bytes
        self._room_to_move = int(self.capacity * _MAX_MOVED)
        return self.head

    def close_head(self) -> Extent | None:
        """Put no more records into the head; it then takes only what was put there."""
        head, self.head = self.head, None
        if head is not None and not head.is_full:
            num_records = len(head.entries)
            head.capacity = num_records
            num_bytes = num_records * self.layout.record_bytes + footer_bytes(num_records)
            self.num_bytes -= head.num_bytes - num_bytes
            head.num_bytes = num_bytes
        return head

    def append(self, record: RecordId) -> Entry:
        """Give a record the next place in the head, which has one; it is pending from now on."""
        assert self.head is not None
        assert not self.head.is_full
        entry = Entry(record, self.head.number, len(self.head.entries), is_pending=True)
        self.head.entries.append(entry)
        self.head.num_pending += 1
        return entry

    def remove(self, extent: Extent) -> None:
        """The file is gone."""
        del self._by_number[extent.number]
        self.num_bytes -= extent.num_bytes

    def lacks_room(self) -> bool:
        """Whether the next head would not fit, though all that leave were gone already."""
        leaving = sum(e.num_bytes for e in self if e.is_leaving)
        return self.num_bytes - leaving + self.extent_bytes > self.max_bytes

    def choose_victim(self) -> Extent | None:
        """Return the extent that should go next; `None` when all are in use."""
        idle = [e for e in self if e is not self.head and not e.is_leaving and not e.is_busy]
        return min(idle, key=lambda e: (e.num_alive, e.number), default=None)

    def worth_moving(self, victim: Extent) -> list[Entry]:
        """Return what of a victim should move to the head, as much as there is room for."""
        if self.head is None:
            return []
        alive = victim.alive()
        if len(alive) > self.capacity * _MOSTLY_DEAD:
            alive = [e for e in alive if e.used]
        room = min(self._room_to_move, self.head.capacity - len(self.head.entries))
        alive = alive[:room]
        self._room_to_move -= len(alive)
        return alive
