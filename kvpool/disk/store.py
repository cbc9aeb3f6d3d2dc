"""The disk tier for one thread: state and worker put together. Blocks until the disk is done.

A pool node drives `DiskState` in its loop and `DiskWorker` in threads instead; it opens them here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from core.ids import BlockHash
from kvpool.disk.files import ExtentFiles, SystemCalls
from kvpool.disk.jobs import (
    EraseJob,
    Failed,
    FileJob,
    FileOutcome,
    NewBlock,
    NoSpace,
    ReadOutcome,
    Stored,
    StoreJob,
    StoreOutcome,
)
from kvpool.disk.records import ALIGNMENT, RecordLayout
from kvpool.disk.scan import scan
from kvpool.disk.state import DiskState, blocks_per_extent
from kvpool.disk.worker import DiskWorker

_T = TypeVar("_T")


class DiskStore:
    """Blocks on disk by key. Not for several threads at a time."""

    def __init__(
        self,
        directory: Path,
        layout: RecordLayout,
        max_bytes: int,
        *,
        num_extent_blocks: int | None = None,
        calls: SystemCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the directory and index what is in it. Raises `ConfigError`, `OSError`."""
        self._clock = clock
        num_extent_blocks = num_extent_blocks or blocks_per_extent(layout, max_bytes)
        self.state = DiskState(layout, max_bytes, num_extent_blocks)
        is_direct = layout.payload_bytes % ALIGNMENT == 0
        self.files = ExtentFiles(directory, is_direct=is_direct, calls=calls)
        try:
            self.worker = DiskWorker(self.files, layout)
            self._run(self.state.load(scan(self.files, layout)))
        except BaseException:
            self.files.close()
            raise

    def close(self) -> None:
        """End writing and unlock the directory."""
        self._run(self.state.close())
        self.files.close()

    def __contains__(self, key: BlockHash) -> bool:
        return key in self.state

    def __len__(self) -> int:
        return len(self.state)

    def store(
        self, blocks: Sequence[NewBlock], payloads: Sequence[memoryview]
    ) -> list[StoreOutcome]:
        """Store blocks; return what became of each."""
        planned = self.state.store(blocks, self._clock())
        outcomes: dict[int, StoreOutcome] = _known(planned.outcomes)
        for job, done in self._run(planned.jobs, payloads):
            if isinstance(job, StoreJob):
                for block, outcome in zip(job.blocks, done, strict=True):
                    assert isinstance(outcome, Stored | NoSpace | Failed)
                    outcomes[block.item] = outcome
        return [outcomes[item] for item in range(len(blocks))]

    def read(
        self, wanted: Sequence[tuple[BlockHash, bytes]], targets: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read blocks, named by key and namespace, into memory of their size."""
        planned = self.state.read(wanted)
        outcomes: dict[int, ReadOutcome] = _known(planned.outcomes)
        if planned.job is not None:
            done = self.worker.read(planned.job, targets)
            for block, outcome in zip(planned.job.blocks, done, strict=True):
                outcomes[block.item] = outcome
            self._run(self.state.read_finished(planned.job, done))
        return [outcomes[item] for item in range(len(wanted))]

    def remove(self, keys: Sequence[BlockHash]) -> bool:
        """Forget blocks; return whether they stay forgotten after a restart."""
        return _all_well(self._run(self.state.remove(keys)))

    def wipe(self, namespace: bytes) -> bool:
        """Forget a namespace; return whether its bytes are gone for good."""
        return _all_well(self._run(self.state.wipe(namespace)))

    def _run(
        self, jobs: Iterable[FileJob], payloads: Sequence[memoryview] = ()
    ) -> list[tuple[FileJob, tuple[FileOutcome, ...]]]:
        todo = deque(jobs)
        done = []
        while todo:
            job = todo.popleft()
            outcomes = self.worker.execute(job, payloads)
            todo += self.state.finished(job, outcomes, self._clock())
            done.append((job, outcomes))
        return done


def _known(outcomes: Iterable[_T | None]) -> dict[int, _T]:
    return {item: outcome for item, outcome in enumerate(outcomes) if outcome is not None}


def _all_well(done: Sequence[tuple[FileJob, tuple[FileOutcome, ...]]]) -> bool:
    return not any(
        isinstance(outcome, NoSpace | Failed)
        for job, outcomes in done
        if isinstance(job, EraseJob)
        for outcome in outcomes
    )
