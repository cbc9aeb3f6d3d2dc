"""The state with jobs that end late and badly, against a disk that is a dictionary of lists."""

from __future__ import annotations

import errno
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import BlockHash
from kvpool.disk.jobs import (
    Corrupt,
    Done,
    DropJob,
    EraseJob,
    Failed,
    FileJob,
    FoundExtent,
    Missing,
    MoveJob,
    NewBlock,
    NoSpace,
    Place,
    Read,
    ReadJob,
    SealJob,
    Stored,
    StoreJob,
)
from kvpool.disk.records import RecordId, footer_bytes
from kvpool.disk.state import DiskState
from kvpool.disk.validation import check_disk
from tests.kvpool.disk.harness import TINY, extent_bytes, key, namespace

CHECKSUMS = bytes(TINY.checksums_bytes)
numbers = st.lists(st.integers(0, 15), min_size=1, max_size=6)


class FakeDisk:
    """Extents as lists; `None` is a place that holds no whole record."""

    def __init__(self) -> None:
        self.extents: dict[int, list[RecordId | None]] = {}
        self.footers: dict[int, tuple[RecordId | None, ...]] = {}

    def put(self, place: Place, record: RecordId | None) -> None:
        records = self.extents.setdefault(place.extent, [])
        records += [None] * (place.index + 1 - len(records))
        records[place.index] = record

    def get(self, place: Place) -> RecordId | None:
        records = self.extents.get(place.extent, [])
        return records[place.index] if place.index < len(records) else None

    def num_bytes(self) -> int:
        return sum(
            len(records) * TINY.record_bytes
            + (footer_bytes(len(records)) if number in self.footers else 0)
            for number, records in self.extents.items()
        )

    def execute(self, job: FileJob, failure: NoSpace | Failed | None) -> tuple[Any, ...]:
        """Do a job; with a failure only its first half."""
        match job:
            case StoreJob(blocks):
                good = len(blocks) if failure is None else len(blocks) // 2
                for block in blocks[:good]:
                    self.put(block.place, block.record)
                return (Stored(),) * good + (failure,) * (len(blocks) - good)
            case MoveJob(_, moves):
                good = len(moves) if failure is None else len(moves) // 2
                for move in moves[:good]:
                    self.put(move.target, self.get(move.source))
                return (Stored(),) * good + (failure,) * (len(moves) - good)
        if failure is not None:
            return (failure,)
        match job:
            case SealJob(extent, records):
                if extent in self.extents:
                    self.footers[extent] = records
            case EraseJob(extent, indexes, _, num_sealed):
                if num_sealed is not None:
                    self.footers.pop(extent, None)
                for index in indexes:
                    if extent in self.extents:
                        self.put(Place(extent, index), None)
            case DropJob(extent):
                self.extents.pop(extent, None)
                self.footers.pop(extent, None)
        return (Done(),)

    def scan(self) -> list[FoundExtent]:
        return [
            FoundExtent(
                number,
                len(records) * TINY.record_bytes
                + (footer_bytes(len(records)) if number in self.footers else 0),
                self.footers.get(number, tuple(records)),
                number in self.footers,
            )
            for number, records in self.extents.items()
        ]


class DiskMachine(RuleBasedStateMachine):
    """`removed` are keys that may never be read again before they are stored again."""

    max_extents = 4

    def __init__(self) -> None:
        super().__init__()
        self.disk = FakeDisk()
        self.now_s = 0.0
        self.removed: set[BlockHash] = set()
        self.known: set[BlockHash] = set()
        self._start()

    def _start(self) -> None:
        self.state = DiskState(TINY, self.max_extents * extent_bytes(TINY), 4)
        self.jobs: deque[FileJob] = deque(self.state.load(self.disk.scan()))
        self.reads: list[ReadJob] = []
        self.known = set(self.state.keys())

    @rule(picked=numbers)
    def store(self, picked: list[int]) -> None:
        blocks = [NewBlock(key(n), namespace(n), CHECKSUMS) for n in picked]
        planned = self.state.store(blocks, self.now_s)
        written = {b.item for j in planned.jobs if isinstance(j, StoreJob) for b in j.blocks}
        assert written == {i for i, outcome in enumerate(planned.outcomes) if outcome is None}
        for job in planned.jobs:
            if isinstance(job, StoreJob):
                places = [b.place for b in job.blocks]
                first = places[0]
                assert places == [Place(first.extent, first.index + i) for i in range(len(places))]
        self.removed -= {blocks[item].key for item in written}
        self.jobs += planned.jobs

    @precondition(lambda self: self.jobs)
    @rule(
        failure=st.sampled_from(
            [None, None, None, NoSpace(), Failed(errno.EIO), Failed(errno.EROFS)]
        )
    )
    def finish(self, failure: NoSpace | Failed | None) -> None:
        job = self.jobs.popleft()
        if isinstance(job, EraseJob):
            failure = None  # a removal that fails is no removal
        outcomes = self.disk.execute(job, failure)
        self.jobs += self.state.finished(job, outcomes, self.now_s)
        for outcome, block in zip(outcomes, getattr(job, "blocks", ()), strict=False):
            if outcome == Stored() and block.record.key in self.state:
                self.known.add(block.record.key)

    @rule(picked=numbers)
    def read(self, picked: list[int]) -> None:
        planned = self.state.read([(key(n), namespace(n)) for n in picked])
        for number, outcome in zip(picked, planned.outcomes, strict=True):
            assert (outcome is None) == (key(number) in self.state)
        if planned.job is not None:
            self.reads.append(planned.job)

    @precondition(lambda self: self.reads)
    @rule(bad=st.sampled_from([None, None, None, Corrupt(), Missing(), Failed(errno.EIO)]))
    def finish_read(self, bad: Any) -> None:
        job = self.reads.pop(0)
        for block in job.blocks:
            found = self.disk.get(block.place)
            if block.key in self.state and block.key not in self.removed:
                assert found is not None, f"{block} is nowhere, though nobody removed it"
                assert (found.key, found.namespace) == (block.key, block.namespace)
        outcomes = [bad or Read(CHECKSUMS) for _ in job.blocks]
        self.jobs += self.state.read_finished(job, outcomes)
        if bad == Corrupt():
            self.removed |= {b.key for b in job.blocks if b.key not in self.state}

    @rule(picked=numbers)
    def remove(self, picked: list[int]) -> None:
        keys = [key(n) for n in picked]
        self.jobs += self.state.remove(keys)
        self.removed |= {*keys}

    @rule(which=st.integers(0, 1))
    def wipe(self, which: int) -> None:
        self.jobs += self.state.wipe(namespace(which))
        self.removed |= {key(n) for n in range(which, 16, 2)}

    @rule(seconds=st.sampled_from([0.5, 1.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def _finish_all(self) -> None:
        for _ in range(10_000):
            if not self.jobs:
                return
            self.finish(None)
        raise AssertionError("jobs beget jobs for ever")

    @rule(is_orderly=st.booleans())
    def restart(self, is_orderly: bool) -> None:
        if is_orderly:
            self._finish_all()
            self.jobs += self.state.close()
        self._finish_all()
        before = set(self.state.keys())
        self._start()
        assert before <= set(self.state.keys())
        self._finish_all()

    @rule()
    def die(self) -> None:
        """What was planned never happens; a removal that was not done may not last."""
        for job in self.jobs:
            if isinstance(job, EraseJob):
                self.removed.clear()
        self._start()

    @rule()
    def settle(self) -> None:
        """With all done, nothing is in use, and the disk takes new blocks again."""
        while self.reads:
            self.finish_read(None)
        self._finish_all()
        assert all(not extent.is_busy for extent in self.state.extents)
        self.now_s += 1000.0
        fresh = [NewBlock(key(100), NAMESPACE, CHECKSUMS)]
        for _ in range(3):  # the first may only make room, after drops that failed
            self.jobs += self.state.store(fresh, self.now_s).jobs
            self._finish_all()
        assert key(100) in self.state
        self.known.add(key(100))
        self.jobs += self.state.remove([key(100)])
        self._finish_all()

    @invariant()
    def agrees(self) -> None:
        check_disk(self.state)
        assert self.disk.num_bytes() <= self.state.max_bytes
        keys = set(self.state.keys())
        assert not keys & self.removed
        lost = set(self.state.take_lost())
        assert not lost & keys
        self.known -= lost
        assert self.known == keys, "what came and went adds up to what is there"


NAMESPACE = b"another namespac"


class TightMachine(DiskMachine):
    max_extents = 2


TestDiskState = DiskMachine.TestCase
TestTightDiskState = TightMachine.TestCase
TestDiskState.settings = TestTightDiskState.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
