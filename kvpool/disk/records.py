"""What a record and an index footer look like on disk. Pure: bytes in, bytes out.

    extent file:  | record 0 | record 1 | ... | record n-1 | footer, once sealed |
    record:       | header, padded to 4096 | payload, padded to 4096 |
    footer:       | key, namespace, sequence of each record | zeros | trailer, up to a 4096 border |

All records of a layout have one size, so that a scan finds the next one behind a broken one. All
numbers are little-endian. A header is complete in itself: nothing else says what a payload is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError
from core.ids import BLOCK_HASH_BYTES, BlockHash
from kvpool.checksum import CHECKSUM_BYTES, slice_checksum

ALIGNMENT = 4096
"""Of every offset and length in an extent file, as direct I/O wants it."""

NAMESPACE_BYTES = 16
FINGERPRINT_BYTES = 16
VERSION = 1

_RECORD_MAGIC = b"HMRECORD"
_FOOTER_MAGIC = b"HMFOOTER"
_HEADER = struct.Struct("<8sII16sQQ16s32s")
"""magic, version, num_layers, fingerprint, payload_bytes, sequence, namespace, key."""
_ENTRY = struct.Struct("<32s16sQ")
"""key, namespace, sequence; the sequence 0 stands for a record that is not alive."""
_TRAILER = struct.Struct("<8sII16sQII")
"""magic, version, num_layers, fingerprint, payload_bytes, num_records, 0; then the checksum."""
_TRAILER_BYTES = _TRAILER.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """What all records of a store have in common; a record of another layout does not exist.

    `fingerprint` is a digest of whatever else gives the payload its meaning, 16 bytes.
    """

    payload_bytes: int
    num_layers: int
    fingerprint: bytes

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be."""
        if min(self.payload_bytes, self.num_layers) < 1 or self.payload_bytes % self.num_layers:
            raise ConfigError(
                f"a block of {self.payload_bytes} bytes has no {self.num_layers} equal layers"
            )
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ConfigError(f"the fingerprint of a layout has {FINGERPRINT_BYTES} bytes")

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.payload_bytes // self.num_layers

    @property
    def checksums_bytes(self) -> int:
        """Bytes of a block's packed slice checksums."""
        return self.num_layers * CHECKSUM_BYTES

    @property
    def header_bytes(self) -> int:
        """Bytes of a header with its padding."""
        return aligned(_HEADER.size + self.checksums_bytes + CHECKSUM_BYTES)

    @property
    def padding_bytes(self) -> int:
        """Zeros behind a payload."""
        return aligned(self.payload_bytes) - self.payload_bytes

    @property
    def record_bytes(self) -> int:
        """From one record to the next."""
        return self.header_bytes + aligned(self.payload_bytes)


@dataclass(frozen=True, slots=True)
class RecordId:
    """Which block a record holds. Of two records of a key, the one of the later sequence counts."""

    key: BlockHash
    namespace: bytes
    sequence: int


def aligned(num_bytes: int) -> int:
    """Round up to the next border."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def footer_bytes(num_records: int) -> int:
    """Bytes of the footer of an extent of so many records."""
    return aligned(num_records * _ENTRY.size + _TRAILER_BYTES)


def encode_header(layout: RecordLayout, record: RecordId, slice_checksums: bytes) -> bytes:
    """Return a header without its padding. `slice_checksums` are packed. Raises `ValueError`."""
    if len(slice_checksums) != layout.checksums_bytes:
        raise ValueError(f"{len(slice_checksums)} bytes of checksums for {layout.num_layers}")
    if len(record.key) != BLOCK_HASH_BYTES or len(record.namespace) != NAMESPACE_BYTES:
        raise ValueError("a key has 32 bytes and a namespace 16")
    head = _HEADER.pack(
        _RECORD_MAGIC,
        VERSION,
        layout.num_layers,
        layout.fingerprint,
        layout.payload_bytes,
        record.sequence,
        record.namespace,
        record.key,
    )
    return _with_checksum(head + slice_checksums)


def decode_header(layout: RecordLayout, raw: memoryview | bytes) -> tuple[RecordId, bytes] | None:
    """Return whose record this is and its packed slice checksums; `None` for anything else.

    Anything else is: never written, torn, damaged, of another layout or of another version.
    """
    checked = _without_checksum(raw[: _HEADER.size + layout.checksums_bytes + CHECKSUM_BYTES])
    if checked is None or len(checked) != _HEADER.size + layout.checksums_bytes:
        return None
    magic, version, num_layers, fingerprint, payload_bytes, sequence, namespace, key = (
        _HEADER.unpack_from(checked)
    )
    found = (magic, version, num_layers, fingerprint, payload_bytes)
    if found != (_RECORD_MAGIC, VERSION, layout.num_layers, layout.fingerprint,
                 layout.payload_bytes):  # fmt: skip
        return None
    return RecordId(BlockHash(key), namespace, sequence), checked[_HEADER.size :]


def encode_footer(layout: RecordLayout, records: Sequence[RecordId | None]) -> bytes:
    """Return the footer of an extent; `None` stands for a record that is not alive."""
    entries = b"".join(
        bytes(_ENTRY.size) if r is None else _ENTRY.pack(r.key, r.namespace, r.sequence)
        for r in records
    )
    trailer = _TRAILER.pack(
        _FOOTER_MAGIC,
        VERSION,
        layout.num_layers,
        layout.fingerprint,
        layout.payload_bytes,
        len(records),
        0,
    )
    room = footer_bytes(len(records)) - _TRAILER_BYTES
    return _with_checksum(entries.ljust(room, b"\0") + trailer)


def footer_records(layout: RecordLayout, last: memoryview | bytes) -> int | None:
    """Return how many records the footer is about that ends with `last` (4096 bytes).

    `None` when there is no footer of this layout. The number is checked by `decode_footer` only.
    """
    if len(last) != ALIGNMENT:
        return None
    found = _TRAILER.unpack_from(last, ALIGNMENT - _TRAILER_BYTES)
    if found[:5] != (_FOOTER_MAGIC, VERSION, layout.num_layers, layout.fingerprint,
                     layout.payload_bytes):  # fmt: skip
        return None
    return int(found[5])


def decode_footer(
    layout: RecordLayout, raw: memoryview | bytes
) -> tuple[RecordId | None, ...] | None:
    """Undo `encode_footer`; `None` when anything is wrong with it."""
    num_records = footer_records(layout, raw[-ALIGNMENT:])
    if num_records is None or len(raw) != footer_bytes(num_records):
        return None
    if (checked := _without_checksum(raw)) is None:
        return None
    entries = _ENTRY.iter_unpack(checked[: num_records * _ENTRY.size])
    return tuple(
        RecordId(BlockHash(key), namespace, sequence) if sequence else None
        for key, namespace, sequence in entries
    )


def _with_checksum(raw: bytes) -> bytes:
    return raw + slice_checksum(raw).to_bytes(CHECKSUM_BYTES, "little")


def _without_checksum(raw: memoryview | bytes) -> bytes | None:
    """Return what the checksum at the end is about; `None` when it does not match."""
    body = bytes(raw[:-CHECKSUM_BYTES])
    is_good = bytes(raw[-CHECKSUM_BYTES:]) == slice_checksum(body).to_bytes(
        CHECKSUM_BYTES, "little"
    )
    return body if is_good else None
