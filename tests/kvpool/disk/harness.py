"""Small blocks with known bytes, and system calls that fail on demand."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path

from core.ids import BlockHash
from kvpool.checksum import pack_checksums, slice_checksum
from kvpool.disk.files import SystemCalls
from kvpool.disk.jobs import NewBlock, Read, ReadOutcome, StoreOutcome
from kvpool.disk.records import RecordLayout, footer_bytes
from kvpool.disk.store import DiskStore

TINY = RecordLayout(96, 3, b"fingerprint of t")
"""Padded, so never with direct I/O."""
ALIGNED = RecordLayout(8192, 2, b"fingerprint of a")
NAMESPACES = (b"first namespace!", b"second namespace")
EXTENT_BLOCKS = 4


def extent_bytes(layout: RecordLayout, num_blocks: int = EXTENT_BLOCKS) -> int:
    return num_blocks * layout.record_bytes + footer_bytes(num_blocks)


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def namespace(number: int) -> bytes:
    """Even numbers are of the first one, odd ones of the second."""
    return NAMESPACES[number % 2]


def payload(layout: RecordLayout, number: int) -> bytes:
    return random.Random(number).randbytes(layout.payload_bytes)


def checksums(layout: RecordLayout, data: bytes) -> bytes:
    step = layout.slice_bytes
    return pack_checksums([slice_checksum(data[i : i + step]) for i in range(0, len(data), step)])


def new_block(layout: RecordLayout, number: int) -> NewBlock:
    return NewBlock(key(number), namespace(number), checksums(layout, payload(layout, number)))


def store(disk: DiskStore, *numbers: int) -> list[StoreOutcome]:
    layout = disk.state.layout
    blocks = [new_block(layout, number) for number in numbers]
    return disk.store(blocks, [memoryview(payload(layout, number)) for number in numbers])


def read(disk: DiskStore, *numbers: int) -> list[ReadOutcome]:
    """Read blocks; whatever is said to be read has the right bytes and checksums."""
    layout = disk.state.layout
    targets = [bytearray(layout.payload_bytes) for _ in numbers]
    outcomes = disk.read(
        [(key(n), namespace(n)) for n in numbers], [memoryview(t) for t in targets]
    )
    for number, target, outcome in zip(numbers, targets, outcomes, strict=True):
        if isinstance(outcome, Read):
            assert bytes(target) == payload(layout, number), f"wrong bytes for block {number}"
            assert outcome.slice_checksums == checksums(layout, bytes(target))
    return outcomes


def readable(disk: DiskStore, *numbers: int) -> set[int]:
    outcomes = read(disk, *numbers)
    return {n for n, outcome in zip(numbers, outcomes, strict=True) if isinstance(outcome, Read)}


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


class Clock:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FaultyCalls(SystemCalls):
    """`write`, `read`, `unlink` and `opening`: the `errno` that such calls end with from now on.

    `room_bytes` is what can still be written, then ENOSPC, after a short write. `most_bytes` is
    what one call moves at most. `refuses_direct` is a file system without direct I/O.
    """

    def __init__(self) -> None:
        self.write = self.read = self.unlinking = self.opening = 0
        self.room_bytes: int | None = None
        self.most_bytes: int | None = None
        self.refuses_direct = False
        self.num_writes = 0

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        _fail(self.opening)
        if self.refuses_direct and flags & 0o40000:
            _fail(errno.EINVAL)
        return super().open(name, flags, dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        _fail(self.unlinking)
        super().unlink(name, dir_fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _fail(self.write)
        self.num_writes += 1
        if self.room_bytes is not None:
            if self.room_bytes == 0:
                _fail(errno.ENOSPC)
            buffers = _first(buffers, self.room_bytes)
            self.room_bytes -= sum(b.nbytes for b in buffers)
        return super().pwritev(fd, _first(buffers, self.most_bytes), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _fail(self.read)
        return super().preadv(fd, _first(buffers, self.most_bytes), offset)


def _fail(code: int) -> None:
    if code:
        raise OSError(code, errno.errorcode[code])


def _first(buffers: Sequence[memoryview], most_bytes: int | None) -> list[memoryview]:
    """Cut to so many bytes."""
    kept: list[memoryview] = []
    left = sum(b.nbytes for b in buffers) if most_bytes is None else most_bytes
    for buffer in buffers:
        if left > 0:
            kept.append(buffer[:left])
            left -= kept[-1].nbytes
    return kept
