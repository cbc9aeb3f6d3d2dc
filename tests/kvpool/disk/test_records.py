"""The bytes on disk, and what a changed byte does to them."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.ids import BlockHash
from kvpool.checksum import pack_checksums, slice_checksum
from kvpool.disk.records import (
    ALIGNMENT,
    RecordId,
    RecordLayout,
    decode_footer,
    decode_header,
    encode_footer,
    encode_header,
    footer_bytes,
    footer_records,
)

LAYOUT = RecordLayout(8, 2, bytes(range(16)))
RECORD = RecordId(BlockHash(bytes(range(32))), bytes(range(100, 116)), 7)
CHECKSUMS = pack_checksums([1, 2**64 - 1])


def test_a_header_is_the_same_everywhere():
    expected = (
        b"HMRECORD" + b"\x01\0\0\0" + b"\x02\0\0\0" + LAYOUT.fingerprint
        + b"\x08" + bytes(7) + b"\x07" + bytes(7) + RECORD.namespace + RECORD.key
        + b"\x01" + bytes(7) + b"\xff" * 8
    )  # fmt: skip
    raw = encode_header(LAYOUT, RECORD, CHECKSUMS)
    assert raw[:-8] == expected
    assert raw[-8:].hex() == "5302123f7719a8ec"
    assert int.from_bytes(raw[-8:], "little") == slice_checksum(expected)
    assert decode_header(LAYOUT, raw.ljust(LAYOUT.header_bytes, b"\0")) == (RECORD, CHECKSUMS)


def test_a_footer_is_the_same_everywhere():
    raw = encode_footer(LAYOUT, [RECORD, None])
    assert len(raw) == ALIGNMENT
    assert raw[:112] == RECORD.key + RECORD.namespace + b"\x07" + bytes(7) + bytes(56)
    assert raw[112:-56] == bytes(ALIGNMENT - 168)
    assert raw[-56:-8] == (
        b"HMFOOTER" + b"\x01\0\0\0" + b"\x02\0\0\0" + LAYOUT.fingerprint
        + b"\x08" + bytes(7) + b"\x02\0\0\0" + bytes(4)
    )  # fmt: skip
    assert raw[-8:].hex() == "2f574121b2f91ec7"
    assert decode_footer(LAYOUT, raw) == (RECORD, None)


@pytest.mark.parametrize("num_records", [0, 1, 72, 73, 1000])
def test_footers_of_all_lengths_are_found_from_their_end(num_records):
    records = [RecordId(RECORD.key, RECORD.namespace, i + 1) for i in range(num_records)]
    raw = encode_footer(LAYOUT, records)
    assert len(raw) == footer_bytes(num_records)
    assert footer_records(LAYOUT, raw[-ALIGNMENT:]) == num_records
    assert decode_footer(LAYOUT, raw) == tuple(records)


def test_no_changed_bit_of_a_header_or_a_footer_goes_unseen():
    header = encode_header(LAYOUT, RECORD, CHECKSUMS)
    footer = encode_footer(LAYOUT, [RECORD, None])
    for raw, decode in ((header, decode_header), (footer, decode_footer)):
        for position in range(len(raw)):
            damaged = bytearray(raw)
            damaged[position] ^= 1 << position % 8
            assert decode(LAYOUT, bytes(damaged)) is None, position
        for length in (0, 1, 8, 64, len(raw) - 1):
            assert decode(LAYOUT, raw[:length]) is None, length


@pytest.mark.parametrize(
    "other",
    [
        RecordLayout(16, 2, LAYOUT.fingerprint),
        RecordLayout(8, 1, LAYOUT.fingerprint),
        RecordLayout(8, 2, bytes(16)),
    ],
)
def test_records_of_another_layout_do_not_exist(other):
    assert decode_header(other, encode_header(LAYOUT, RECORD, CHECKSUMS).ljust(4096, b"\0")) is None
    assert decode_footer(other, encode_footer(LAYOUT, [RECORD])) is None


def test_everything_lies_at_a_border():
    real = RecordLayout(737_280, 30, bytes(16))
    assert (real.header_bytes, real.padding_bytes, real.record_bytes) == (4096, 0, 741_376)
    deep = RecordLayout(1000 * 10, 1000, bytes(16))
    assert (deep.header_bytes, deep.padding_bytes) == (8192, 2288)
    assert deep.record_bytes % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("size", "layers", "mark"), [(0, 1, 16), (8, 0, 16), (8, 3, 16), (8, 2, 1)]
)
def test_impossible_layouts_are_refused(size, layers, mark):
    with pytest.raises(ConfigError):
        RecordLayout(size, layers, bytes(mark))


def test_only_whole_headers_are_written():
    with pytest.raises(ValueError, match="checksums"):
        encode_header(LAYOUT, RECORD, CHECKSUMS[:8])
    with pytest.raises(ValueError, match="32 bytes"):
        encode_header(LAYOUT, RecordId(BlockHash(b"short"), RECORD.namespace, 1), CHECKSUMS)
