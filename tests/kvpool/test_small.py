"""Checksums, the LRU policy, and what a host's memory allows."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.hashing import HashRoot, extend_block_hashes
from core.ids import Incarnation, SlotHandle
from kvpool.checksum import block_checksum, pack_checksums, slice_checksum, unpack_checksums
from kvpool.memory import available_memory, check_memory, make_layout
from kvpool.policy import LruPolicy
from tests.kvpool.harness import hashes


def test_checksums_are_the_same_everywhere():
    """B29: golden values; xxh3-64 of nothing is published by its author."""
    assert slice_checksum(b"") == 0x2D06800538D394C2
    assert slice_checksum(memoryview(bytes(range(256)))) == 0x9408A4433B952D71
    assert pack_checksums([1, 2]) == b"\x01" + bytes(7) + b"\x02" + bytes(7)
    assert unpack_checksums(pack_checksums([5, 2**64 - 1])) == (5, 2**64 - 1)
    assert block_checksum([1, 2]) == slice_checksum(pack_checksums([1, 2]))
    with pytest.raises(ValueError, match="8 bytes each"):
        unpack_checksums(b"123")


def test_block_hashes_are_the_same_everywhere():
    """B29: the key of a block does not depend on the process, and [1, 23] is not [12, 3]."""
    root = HashRoot("m", "t", "f32", "l", 2).digest()
    assert root.hex() == ("28576a12883b7b49b1b994a4ffb31288a23e230563292c5f0b1d09fe9d5e3255")
    first, second = extend_block_hashes(root, [1, 23, 12, 3], 2)
    assert first.hex() == ("9bf28d7aea40ce0e72c7c8a92845fd815759c2d8aaae2193a9774350cc040ac9")
    assert extend_block_hashes(root, [12, 3], 2) != [first]
    assert second not in (first, root)


def test_lru_evicts_later_blocks_of_a_prefix_first():
    lru = LruPolicy()
    lru.released(hashes(1, 2, 3))
    lru.released(hashes(4, 5))
    lru.held(hashes(2)[0])
    lru.forgotten(hashes(4)[0])
    assert len(lru) == 3
    lru.released(hashes(2))
    assert [lru.pop_victim() for _ in range(5)] == [*hashes(3, 1, 5, 2), None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64, 4, 64), "positive"),
        ((1, 63, 4, 64), "no multiple of num_layers"),
        ((1, 128, 4, 64), "below slot_bytes"),
        ((1000, 64, 4, 64), "raise segment_bytes to 320"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_layout(*arguments)


def test_slots_are_bounded_in_every_segment():
    layout = make_layout(5, 64, 4, 128)
    life = Incarnation("x")
    assert [layout.index(SlotHandle(s, i, life, 1)) for s, i in ((0, 0), (1, 1), (2, 0))] == [
        0,
        3,
        4,
    ]
    for segment, slot in ((2, 1), (0, 2), (-1, 0), (1, -1), (3, 0), (-1, 3)):
        assert SlotHandle(segment, slot, life, 1) not in layout


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_above_the_process_counts(tmp_path, version):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    controllers, top, limit, usage = (
        ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("", "sys/fs/cgroup", "memory.max", "memory.current")
    )
    (proc / "self/cgroup").write_text(f"7:cpu:/other\n4:{controllers}:/outer/inner\n")
    outer = tmp_path / top / "outer"
    (outer / "inner").mkdir(parents=True)
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    (outer / "inner" / limit).write_text(unlimited)
    (outer / "inner" / usage).write_text("5\n")
    assert available_memory(tmp_path) == (8_000_000 << 10, "MemAvailable")
    (outer / limit).write_text(str(1000 << 20))
    (outer / usage).write_text(str(400 << 20))
    assert available_memory(tmp_path) == (600 << 20, f"the memory limit of cgroup {outer}")
    check_memory(344 << 20, root=tmp_path)
    with pytest.raises(ConfigError, match=r"needs 345 MiB .* leaves 600 MiB: .* at most 344 MiB"):
        check_memory(345 << 20, root=tmp_path)
