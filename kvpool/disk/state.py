"""The disk tier's decisions. Pure: calls in, jobs out; outcomes in, more jobs out.

A block's life:

1. `store` gives it a place in the head and returns a `StoreJob`; until `finished` tells that it was
   written, nobody can read it.
2. `read` returns a `ReadJob`; its extent stays until `read_finished`.
3. When the bound leaves no room for another head, the cheapest extent goes (see
   `kvpool/disk/extents.py`): a `MoveJob` saves what is worth it, the rest is evicted, and a
   `DropJob` removes the file once nobody reads from it.
4. `take_lost` tells which blocks are no longer there.

The index is soft: a wrong entry costs a read that says `Missing` or `Corrupt`, never wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import EIO

from core.errors import ConfigError
from core.ids import BlockHash
from kvpool.disk.breaker import Breaker
from kvpool.disk.extents import Entry, Extent, Extents
from kvpool.disk.jobs import (
    AlreadyThere,
    Corrupt,
    DiskCounters,
    Done,
    DropJob,
    EraseJob,
    Failed,
    FileJob,
    FileOutcome,
    FoundExtent,
    Missing,
    Move,
    MoveJob,
    NewBlock,
    NoSpace,
    Place,
    PlacedBlock,
    PlannedRead,
    PlannedStore,
    Read,
    ReadJob,
    ReadOutcome,
    SealJob,
    Stored,
    StoreJob,
    StoreOutcome,
    WantedBlock,
)
from kvpool.disk.records import RecordId, RecordLayout, footer_bytes

_EXTENT_BYTES = 64 << 20
_MIN_EXTENTS = 16
"""Extents that a store should have at least: one of them is always spare."""


@dataclass(slots=True)
class DiskState:
    """See the module's docstring. `now_s` is any monotonic clock."""

    layout: RecordLayout
    max_bytes: int
    blocks_per_extent: int
    breaker: Breaker = field(default_factory=Breaker)
    counters: DiskCounters = field(default_factory=DiskCounters)
    extents: Extents = field(init=False)
    _alive: dict[BlockHash, Entry] = field(default_factory=dict)
    _pending: dict[BlockHash, Entry] = field(default_factory=dict)
    _namespaces: dict[bytes, bytes] = field(default_factory=dict)
    _lost: dict[BlockHash, None] = field(default_factory=dict)
    _sequence: int = 0
    _must_shrink: bool = False
    _refusal: NoSpace | Failed = field(default_factory=NoSpace)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a bound that cannot be kept."""
        self.extents = Extents(self.layout, self.max_bytes, self.blocks_per_extent)
        least = 2 * self.extents.extent_bytes
        if self.blocks_per_extent < 1 or self.max_bytes < least:
            raise ConfigError(
                f"a disk tier of {self.max_bytes} bytes has no room for 2 extents of "
                f"{self.blocks_per_extent} blocks: give it at least {least} bytes"
            )

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._alive

    def __len__(self) -> int:
        return len(self._alive)

    def keys(self) -> tuple[BlockHash, ...]:
        """Return the keys of all blocks that can be read."""
        return tuple(self._alive)

    def take_lost(self) -> tuple[BlockHash, ...]:
        """Return which blocks went since the last call, and are not back, for whatever reason."""
        lost, self._lost = self._lost, {}
        return tuple(key for key in lost if key not in self._alive)

    # --- start and end ---

    def load(self, found: Sequence[FoundExtent]) -> tuple[FileJob, ...]:
        """Take what a scan found, once, before anything else. The jobs are to be done first."""
        jobs: list[FileJob] = []
        for item in sorted(found, key=lambda f: f.number):
            extent = self.extents.add(item.number, item.num_bytes, item.records)
            extent.is_sealed = item.is_sealed
            for entry in extent.entries:
                if entry is not None:
                    self._sequence = max(self._sequence, entry.record.sequence)
                    entry.record = self._shared(entry.record)
                    jobs += self._load_entry(entry)
        jobs += self._leave([e for e in self.extents if not e.num_alive])
        while (
            self.extents.num_bytes - sum(e.num_bytes for e in self.extents if e.is_leaving)
            > self.max_bytes
        ):
            victim = self.extents.choose_victim()
            assert victim is not None
            jobs += self._evict(victim, moved=[])
        return tuple(jobs)

    def _load_entry(self, entry: Entry) -> list[FileJob]:
        """Of two records of one key the later stays; the other would come back after a removal."""
        other = self._alive.get(entry.record.key)
        if other is not None and other.record.sequence > entry.record.sequence:
            return [self._erase(self.extents[entry.extent], [entry.index], whole=False)]
        self._set_alive(entry)
        if other is None:
            return []
        return [self._erase(self.extents[other.extent], [other.index], whole=False)]

    def close(self) -> tuple[FileJob, ...]:
        """End writing. The jobs make the next start faster."""
        head = self.extents.close_head()
        return () if head is None else tuple(self._seal(head))

    # --- storing ---

    def store(self, blocks: Sequence[NewBlock], now_s: float) -> PlannedStore:
        """Plan to store blocks. A block that is there already counts as used."""
        if any(len(b.slice_checksums) != self.layout.checksums_bytes for b in blocks):
            raise ValueError("a block has a checksum for each layer")
        jobs: list[FileJob] = []
        outcomes: list[StoreOutcome | None] = []
        is_allowed = self.breaker.allows(now_s)
        placed: list[PlacedBlock] = []
        for item, block in enumerate(blocks):
            if self._has(block):
                outcomes.append(AlreadyThere())
            elif not is_allowed:
                outcomes.append(self._refusal)
            elif not self._make_head(jobs, placed):
                outcomes.append(NoSpace())
            else:
                placed.append(self._place(item, block))
                outcomes.append(None)
        _flush(jobs, placed)
        if jobs:
            self.breaker.began()
        return PlannedStore(tuple(outcomes), tuple(jobs))

    def _has(self, block: NewBlock) -> bool:
        entry = self._alive.get(block.key) or self._pending.get(block.key)
        if entry is None or entry.record.namespace != block.namespace:
            return False
        entry.used = True
        return True

    def _place(self, item: int, block: NewBlock) -> PlacedBlock:
        self._sequence += 1
        record = self._shared(RecordId(block.key, block.namespace, self._sequence))
        entry = self.extents.append(record)
        self._pending[block.key] = entry
        return PlacedBlock(item, Place(entry.extent, entry.index), record, block.slice_checksums)

    def _make_head(self, jobs: list[FileJob], placed: list[PlacedBlock]) -> bool:
        """See to it that the head has room, and that the next one will have."""
        head = self.extents.head
        if head is not None and not head.is_full:
            return True
        _flush(jobs, placed)
        self.extents.close_head()
        if self._must_shrink and (victim := self.extents.choose_victim()) is not None:
            self._must_shrink = False
            jobs += self._evict(victim, moved=[])
        if self.extents.open_head() is None:
            jobs += self._make_room()
            return False
        jobs += self._make_room()
        assert self.extents.head is not None
        return not self.extents.head.is_full

    def _make_room(self) -> list[FileJob]:
        jobs = self._leave([e for e in self.extents if e.is_leaving])
        while self.extents.lacks_room():
            if (victim := self.extents.choose_victim()) is None:
                break
            jobs += self._evict(victim, self.extents.worth_moving(victim))
        return jobs

    def _evict(self, victim: Extent, moved: list[Entry]) -> list[FileJob]:
        keep = {entry.index for entry in moved}
        for entry in victim.alive():
            if entry.index not in keep:
                self._forget(entry)
                self.counters.num_evicted += 1
        if not moved:
            return self._leave([victim])
        victim.is_leaving = True
        moves = []
        for entry in moved:
            copy = self.extents.append(entry.record)
            source = Place(entry.extent, entry.index)
            moves.append(Move(source, Place(copy.extent, copy.index), entry.record.key))
        victim.num_moving = len(moves)
        return [MoveJob(victim.number, tuple(moves))]

    def _leave(self, extents: Sequence[Extent]) -> list[FileJob]:
        jobs: list[FileJob] = []
        for extent in extents:
            extent.is_leaving = True
            if not extent.is_busy and not extent.num_alive and not extent.is_dropping:
                extent.is_dropping = True
                jobs.append(DropJob(extent.number))
        return jobs

    def _seal(self, extent: Extent) -> list[FileJob]:
        """Have the footer written once all outcomes are known."""
        is_done = extent.is_full and not extent.num_pending and extent is not self.extents.head
        if not is_done or extent.is_sealed or extent.is_leaving:
            return []
        if not extent.num_alive:
            return self._leave([extent])
        extent.is_sealed = True
        records = tuple(e.record if e is not None and e.is_alive else None for e in extent.entries)
        return [SealJob(extent.number, records)]

    # --- reading ---

    def read(self, wanted: Sequence[tuple[BlockHash, bytes]]) -> PlannedRead:
        """Plan to read blocks, named by key and namespace."""
        blocks, outcomes = [], list[Missing | None]()
        for item, (key, namespace) in enumerate(wanted):
            entry = self._alive.get(key)
            if entry is None or entry.record.namespace != namespace:
                self.counters.num_missing += 1
                outcomes.append(Missing())
                continue
            entry.used = True
            self.extents[entry.extent].num_readers += 1
            blocks.append(WantedBlock(item, Place(entry.extent, entry.index), key, namespace))
            outcomes.append(None)
        return PlannedRead(tuple(outcomes), ReadJob(tuple(blocks)) if blocks else None)

    def read_finished(self, job: ReadJob, outcomes: Sequence[ReadOutcome]) -> tuple[FileJob, ...]:
        """Drop what turned out to be wrong; let go of the extents."""
        jobs: list[FileJob] = []
        for block, outcome in zip(job.blocks, outcomes, strict=True):
            extent = self.extents[block.place.extent]
            extent.num_readers -= 1
            match outcome:
                case Read():
                    self.counters.num_read += 1
                case Missing():
                    self.counters.num_missing += 1
                    self._forget_at(block)
                case Corrupt():
                    self.counters.num_corrupt += 1
                    if self._forget_at(block):
                        jobs.append(self._erase(extent, [block.place.index], whole=False))
                case Failed(errno):
                    self.counters.num_failed_reads += 1
                    if errno == EIO:
                        self._forget_at(block)
            if extent.is_leaving:
                jobs += self._leave([extent])
        return tuple(jobs)

    def _forget_at(self, block: WantedBlock) -> bool:
        entry = self._alive.get(block.key)
        if entry is None or (entry.extent, entry.index) != (block.place.extent, block.place.index):
            return False
        self._forget(entry)
        return True

    # --- removing ---

    def remove(self, keys: Sequence[BlockHash]) -> tuple[FileJob, ...]:
        """Forget blocks, those on their way too; they stay forgotten once all jobs are done.

        Looks at every record: a dead one could come back at the next start.
        """
        wanted = frozenset(keys)
        return self._erase_all(lambda e: e is not None and e.record.key in wanted, whole=False)

    def wipe(self, namespace: bytes) -> tuple[FileJob, ...]:
        """Have every byte of a namespace overwritten. All is done with the last job.

        Records that may hold anything are overwritten too. A job that fails leaves bytes behind.
        """
        return self._erase_all(lambda e: e is None or e.record.namespace == namespace, whole=True)

    def _erase_all(
        self, is_meant: Callable[[Entry | None], bool], *, whole: bool
    ) -> tuple[FileJob, ...]:
        """Erase behind everything that is under way: these jobs are done in order."""
        jobs: list[FileJob] = []
        for extent in self.extents:
            hit = [index for index, entry in enumerate(extent.entries) if is_meant(entry)]
            for index in hit:
                if (entry := extent.entries[index]) is not None:
                    self._forget(entry)
                    if self._pending.get(entry.record.key) is entry:
                        del self._pending[entry.record.key]
            if hit:
                jobs.append(self._erase(extent, hit, whole=whole))
        return tuple(jobs)

    def _erase(self, extent: Extent, indexes: Sequence[int], *, whole: bool) -> EraseJob:
        num_sealed = len(extent.entries) if extent.is_sealed else None
        extent.is_sealed = False
        return EraseJob(extent.number, tuple(indexes), whole, num_sealed)

    # --- outcomes ---

    def finished(
        self, job: FileJob, outcomes: Sequence[FileOutcome], now_s: float
    ) -> tuple[FileJob, ...]:
        """Take the outcomes of a job that changed files; return what is to be done next.

        A block that was stored, and removed meanwhile, is not in the state after this.
        """
        self._mind(outcomes, now_s)
        match job:
            case StoreJob(blocks):
                for block, outcome in zip(blocks, outcomes, strict=True):
                    entry = self._written(block.place)
                    if self._pending.get(block.record.key) is not entry:
                        continue  # removed meanwhile
                    del self._pending[block.record.key]
                    if isinstance(outcome, Stored):
                        self.counters.num_stored += 1
                        self._set_alive(entry)
                return self._after_writing(blocks[0].place.extent, outcomes)
            case MoveJob(number, moves):
                erased: list[FileJob] = []
                for move, outcome in zip(moves, outcomes, strict=True):
                    erased += self._moved(move, isinstance(outcome, Stored))
                jobs = self._after_writing(moves[0].target.extent, outcomes)
                return (*erased, *jobs, *self._leave([self.extents[number]]))
            case DropJob(number):
                extent = self.extents[number]
                extent.is_dropping = False
                if isinstance(outcomes[0], Done):
                    self.extents.remove(extent)
            case SealJob() | EraseJob():
                pass
        return ()

    def _mind(self, outcomes: Sequence[FileOutcome], now_s: float) -> None:
        """Tell the breaker; remember why it is open."""
        bad = [o for o in outcomes if isinstance(o, NoSpace | Failed)]
        if not bad:
            self.breaker.succeeded()
            return
        self.counters.num_failed_writes += len(bad)
        self._refusal = bad[0]
        self._must_shrink |= isinstance(bad[0], NoSpace)
        self.breaker.failed(now_s)

    def _after_writing(self, number: int, outcomes: Sequence[FileOutcome]) -> tuple[FileJob, ...]:
        """Go on elsewhere after a failure; seal what is full."""
        extent = self.extents[number]
        has_failed = any(isinstance(o, NoSpace | Failed) for o in outcomes)
        if extent is self.extents.head and (has_failed or extent.is_full):
            self.extents.close_head()
        return tuple(self._seal(extent))

    def _written(self, place: Place) -> Entry:
        """End a pending record."""
        extent = self.extents[place.extent]
        entry = extent.entries[place.index]
        assert entry is not None
        entry.is_pending = False
        extent.num_pending -= 1
        return entry

    def _moved(self, move: Move, is_stored: bool) -> list[FileJob]:
        self.extents[move.source.extent].num_moving -= 1
        target = self.extents[move.target.extent]
        copy = self._written(move.target)
        old = self._alive.get(move.key)
        if old is None or (old.extent, old.index) != (move.source.extent, move.source.index):
            # Removed meanwhile: the copy would come back at the next start.
            return [self._erase(target, [copy.index], whole=False)] if is_stored else []
        self._forget(old)
        if is_stored:
            self.counters.num_moved += 1
            self._set_alive(copy)
        return []

    def _set_alive(self, entry: Entry) -> None:
        if (other := self._alive.get(entry.record.key)) is not None:
            self._forget(other)
        self._alive[entry.record.key] = entry
        entry.is_alive = True
        self.extents[entry.extent].num_alive += 1

    def _forget(self, entry: Entry) -> None:
        if entry.is_alive:
            entry.is_alive = False
            self.extents[entry.extent].num_alive -= 1
            del self._alive[entry.record.key]
            self._lost[entry.record.key] = None

    def _shared(self, record: RecordId) -> RecordId:
        """Let all records of a namespace share its bytes."""
        namespace = self._namespaces.setdefault(record.namespace, record.namespace)
        return RecordId(record.key, namespace, record.sequence)


def blocks_per_extent(layout: RecordLayout, max_bytes: int) -> int:
    """Return a sensible number: extents of 64 MiB, and at least 16 of them."""
    room = min(_EXTENT_BYTES, max_bytes // _MIN_EXTENTS) - footer_bytes(1)
    return max(1, room // layout.record_bytes)


def _flush(jobs: list[FileJob], placed: list[PlacedBlock]) -> None:
    """Close the `StoreJob` of what was placed so far: a job has one extent."""
    if placed:
        jobs.append(StoreJob(tuple(placed)))
        placed.clear()
