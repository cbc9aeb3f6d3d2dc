"""What is on disk at start: the index footers of sealed extents, the headers of all others.

Payloads are not looked at: their checksums are, when they are read.
"""

from __future__ import annotations

import logging
import mmap
from concurrent.futures import ThreadPoolExecutor

from kvpool.disk.files import ExtentFile, ExtentFiles
from kvpool.disk.jobs import FoundExtent
from kvpool.disk.records import (
    ALIGNMENT,
    RecordId,
    RecordLayout,
    aligned,
    decode_footer,
    decode_header,
    footer_bytes,
    footer_records,
)

log = logging.getLogger(__name__)

_NUM_THREADS = 8
"""Small reads at a time: a disk answers several as fast as one."""


def scan(files: ExtentFiles, layout: RecordLayout) -> list[FoundExtent]:
    """Return all extents. What cannot be read holds nothing alive."""
    with ThreadPoolExecutor(_NUM_THREADS, "disk-scan") as pool:
        return list(pool.map(lambda number: _scan_extent(files, layout, number), files.numbers()))


def _scan_extent(files: ExtentFiles, layout: RecordLayout, number: int) -> FoundExtent:
    try:
        with files.open(number) as file:
            size = file.size()
            records = _read_footer(file, layout, size)
            if records is not None:
                return FoundExtent(number, size, records, is_sealed=True)
            found = _read_headers(file, layout, size)
            # Erasing the torn record at the end makes it whole.
            num_bytes = max(size, len(found) * layout.record_bytes)
            return FoundExtent(number, num_bytes, found, is_sealed=False)
    except OSError as error:
        log.warning("extent %x of the disk tier cannot be read: %s", number, error.strerror)
        return FoundExtent(number, 0, (), is_sealed=False)


def _read_footer(
    file: ExtentFile, layout: RecordLayout, size: int
) -> tuple[RecordId | None, ...] | None:
    if size < ALIGNMENT or size % ALIGNMENT:
        return None
    last = _read(file, size - ALIGNMENT, ALIGNMENT)
    num_records = footer_records(layout, last)
    if num_records is None:
        return None
    num_bytes = footer_bytes(num_records)
    if size != num_records * layout.record_bytes + num_bytes:
        return None
    return decode_footer(layout, _read(file, size - num_bytes, num_bytes))


def _read_headers(file: ExtentFile, layout: RecordLayout, size: int) -> tuple[RecordId | None, ...]:
    records: list[RecordId | None] = []
    for start in range(0, size, layout.record_bytes):
        decoded = None
        if start + layout.record_bytes <= size:
            try:
                decoded = decode_header(layout, _read(file, start, layout.header_bytes))
            except OSError as error:
                log.warning("a record of the disk tier cannot be read: %s", error.strerror)
        records.append(decoded[0] if decoded is not None else None)
    return tuple(records)


def _read(file: ExtentFile, offset: int, num_bytes: int) -> memoryview:
    """Read at a border; shorter at the end of the file. Raises `OSError`."""
    memory = memoryview(mmap.mmap(-1, aligned(num_bytes)))
    return memory[: file.read([memory], offset)][:num_bytes]
