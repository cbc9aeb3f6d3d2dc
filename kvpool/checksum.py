"""Checksums of KV bytes: xxh3-64 per layer slice, and per block over its slice checksums.

They find accidents (a torn write, a flipped bit, a reused slot), not forgery; peers are
authenticated by the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

CHECKSUM_BYTES = 8


def slice_checksum(data: memoryview | bytes) -> int:
    """Return xxh3-64 of contiguous bytes. Releases the GIL for large `data`."""
    return xxh3_64_intdigest(data)


def block_checksum(slice_checksums: Sequence[int]) -> int:
    """Return the checksum of a block whose slices, by layer, have these checksums."""
    return xxh3_64_intdigest(pack_checksums(slice_checksums))


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Pack as little-endian u64. Raises `struct.error` for a number outside u64."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_checksums(raw: bytes) -> tuple[int, ...]:
    """Undo `pack_checksums`. Raises `ValueError` when `raw` is not a whole number of them."""
    if len(raw) % CHECKSUM_BYTES:
        raise ValueError(f"checksums take {CHECKSUM_BYTES} bytes each; got {len(raw)} bytes")
    return struct.unpack(f"<{len(raw) // CHECKSUM_BYTES}Q", raw)
