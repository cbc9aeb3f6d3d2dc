"""Does the jobs of `DiskState`: system calls and checksums, nothing else. Runs in any thread.

Payloads go straight from and into the memory that the caller names; the calls and the checksums of
large slices release the GIL. A read is verified here, once, right after it came: the thread has
nothing else to do, and the bytes are still near. No job raises for what the disk does.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from kvpool.checksum import pack_checksums, slice_checksum
from kvpool.disk.files import ExtentFile, ExtentFiles
from kvpool.disk.jobs import (
    Corrupt,
    Done,
    DropJob,
    EraseJob,
    Failed,
    FileJob,
    FileOutcome,
    Missing,
    MoveJob,
    NoSpace,
    Read,
    ReadJob,
    ReadOutcome,
    SealJob,
    Stored,
    StoreJob,
    WantedBlock,
)
from kvpool.disk.records import (
    RecordLayout,
    decode_header,
    encode_footer,
    encode_header,
    footer_bytes,
)

_MAX_BUFFERS = 1023
"""Buffers of one call; the kernel takes at most 1024."""
_READ_BYTES = 8 << 20
"""Records that lie side by side are read at once up to here, then verified."""


@dataclass(frozen=True, slots=True)
class DiskWorker:
    """See the module's docstring."""

    files: ExtentFiles
    layout: RecordLayout

    def execute(self, job: FileJob, payloads: Sequence[memoryview] = ()) -> tuple[FileOutcome, ...]:
        """Do a job that changes files, none beside it. `payloads` are those of the store's batch.

        The caller keeps the payloads as they are until this returns.
        """
        match job:
            case StoreJob():
                return self._store(job, payloads)
            case MoveJob():
                return self._move(job)
            case SealJob():
                return (self._seal(job),)
            case EraseJob():
                return (self._erase(job),)
            case DropJob(extent):
                try:
                    self.files.remove(extent)
                except OSError as error:
                    return (_refused(error.errno),)
                return (Done(),)
            case _:
                assert_never(job)

    # --- reading ---

    def read(self, job: ReadJob, targets: Sequence[memoryview]) -> tuple[ReadOutcome, ...]:
        """Read blocks into the targets of their batch and verify them."""
        outcomes: dict[WantedBlock, ReadOutcome] = {}
        by_extent: dict[int, list[WantedBlock]] = {}
        for block in job.blocks:
            if targets[block.item].nbytes != self.layout.payload_bytes:
                raise ValueError(f"a block has {self.layout.payload_bytes} bytes")
            by_extent.setdefault(block.place.extent, []).append(block)
        for extent, blocks in by_extent.items():
            try:
                with self.files.open(extent) as file:
                    for run in self._runs(blocks):
                        outcomes |= self._read_run(file, run, targets)
            except OSError as error:
                outcomes |= {b: _unread(error.errno) for b in blocks if b not in outcomes}
        return tuple(outcomes[block] for block in job.blocks)

    def _runs(self, blocks: Sequence[WantedBlock]) -> Iterator[list[WantedBlock]]:
        """Split into what can be read with one call each."""
        most = max(1, min(_READ_BYTES // self.layout.record_bytes, _MAX_BUFFERS // 3))
        run: list[WantedBlock] = []
        for block in sorted(blocks, key=lambda b: b.place.index):
            if run and (block.place.index != run[-1].place.index + 1 or len(run) == most):
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _read_run(
        self, file: ExtentFile, run: Sequence[WantedBlock], targets: Sequence[memoryview]
    ) -> dict[WantedBlock, ReadOutcome]:
        size, padding = self.layout.header_bytes, self.layout.padding_bytes
        headers = _memory(len(run) * size)
        ignored = _memory(padding)
        buffers: list[memoryview] = []
        for number, block in enumerate(run):
            buffers += [headers[number * size :][:size], targets[block.item], ignored]
        done, code = _transfer(file.read, buffers, self._offset(run[0].place.index))
        num_read = done // self.layout.record_bytes
        outcomes = {
            block: self._judge(block, headers[number * size :][:size], targets[block.item])
            for number, block in enumerate(run[:num_read])
        }
        rest = run[num_read:]
        if rest and code is not None and len(run) > 1:
            # One bad sector is no reason to miss its neighbours.
            for block in rest:
                outcomes |= self._read_run(file, [block], targets)
        else:
            outcomes |= {b: Missing() if code is None else _unread(code) for b in rest}
        return outcomes

    def _judge(self, block: WantedBlock, header: memoryview, payload: memoryview) -> ReadOutcome:
        if (decoded := decode_header(self.layout, header)) is None:
            return Corrupt()
        record, checksums = decoded
        if (record.key, record.namespace) != (block.key, block.namespace):
            return Missing()
        step = self.layout.slice_bytes
        found = [slice_checksum(payload[i : i + step]) for i in range(0, payload.nbytes, step)]
        return Read(checksums) if pack_checksums(found) == checksums else Corrupt()

    # --- changing files ---

    def _store(self, job: StoreJob, payloads: Sequence[memoryview]) -> tuple[FileOutcome, ...]:
        size = self.layout.header_bytes
        headers = _memory(len(job.blocks) * size)
        padding = _memory(self.layout.padding_bytes)
        buffers: list[memoryview] = []
        for number, block in enumerate(job.blocks):
            if payloads[block.item].nbytes != self.layout.payload_bytes:
                raise ValueError(f"a block has {self.layout.payload_bytes} bytes")
            raw = encode_header(self.layout, block.record, block.slice_checksums)
            headers[number * size :][: len(raw)] = raw
            buffers += [headers[number * size :][:size], payloads[block.item], padding]
        first = job.blocks[0].place
        try:
            with self.files.open(first.extent, write=True, create=True) as file:
                done, code = _transfer(file.write, buffers, self._offset(first.index))
        except OSError as error:
            done, code = 0, error.errno
        num_written = done // self.layout.record_bytes
        return tuple(
            Stored() if number < num_written else _refused(code)
            for number in range(len(job.blocks))
        )

    def _move(self, job: MoveJob) -> tuple[FileOutcome, ...]:
        scratch = _memory(self.layout.record_bytes)
        target = job.moves[0].target.extent
        outcomes: list[FileOutcome] = []
        try:
            source_file = self.files.open(job.extent)
        except OSError:
            return (Missing(),) * len(job.moves)
        with source_file:
            try:
                target_file = self.files.open(target, write=True, create=True)
            except OSError as error:
                return (_refused(error.errno),) * len(job.moves)
            with target_file:
                for move in job.moves:
                    done, _ = _transfer(
                        source_file.read, [scratch], self._offset(move.source.index)
                    )
                    if done < scratch.nbytes:
                        outcomes.append(Missing())
                        continue
                    outcomes.append(
                        self._write(target_file, [scratch], self._offset(move.target.index))
                    )
        return tuple(outcomes)

    def _seal(self, job: SealJob) -> FileOutcome:
        footer = encode_footer(self.layout, job.records)
        memory = _memory(len(footer))
        memory[:] = footer
        try:
            with self.files.open(job.extent, write=True) as file:
                return self._write(file, [memory], self._offset(len(job.records)))
        except FileNotFoundError:
            return Done()
        except OSError as error:
            return _refused(error.errno)

    def _erase(self, job: EraseJob) -> FileOutcome:
        layout = self.layout
        zeros = _memory(layout.record_bytes if job.whole else layout.header_bytes)
        parts = [(zeros, index) for index in job.indexes]
        if job.num_sealed is not None:
            parts.insert(0, (_memory(footer_bytes(job.num_sealed)), job.num_sealed))
        try:
            with self.files.open(job.extent, write=True) as file:
                for memory, index in parts:
                    outcome = self._write(file, [memory], self._offset(index))
                    if not isinstance(outcome, Stored):
                        return outcome
                if job.whole:
                    file.sync()
        except FileNotFoundError:
            return Done()
        except OSError as error:
            return _refused(error.errno)
        return Done()

    def _write(
        self, file: ExtentFile, buffers: Sequence[memoryview], offset: int
    ) -> Stored | NoSpace | Failed:
        done, code = _transfer(file.write, buffers, offset)
        return Stored() if done == sum(b.nbytes for b in buffers) else _refused(code)

    def _offset(self, index: int) -> int:
        return index * self.layout.record_bytes


def _memory(num_bytes: int) -> memoryview:
    """Return zeroed memory at a page's border."""
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes else b"")


def _transfer(
    call: Callable[[Sequence[memoryview], int], int], buffers: Sequence[memoryview], offset: int
) -> tuple[int, int | None]:
    """Repeat a call until all is done; return the bytes done and the `errno` that ended it early.

    Without an `errno` the file ended, or the call made no progress.
    """
    left = [buffer for buffer in buffers if buffer.nbytes]
    done = 0
    while left:
        try:
            num_bytes = call(left[:_MAX_BUFFERS], offset + done)
        except OSError as error:
            return done, error.errno
        if num_bytes == 0:
            break
        done += num_bytes
        while left and num_bytes >= left[0].nbytes:
            num_bytes -= left.pop(0).nbytes
        if num_bytes:
            left[0] = left[0][num_bytes:]
    return done, None


def _refused(code: int | None) -> NoSpace | Failed:
    return NoSpace() if code in (errno.ENOSPC, errno.EDQUOT) else Failed(code or errno.EIO)


def _unread(code: int | None) -> Missing | Failed:
    return Missing() if code == errno.ENOENT else Failed(code or errno.EIO)
