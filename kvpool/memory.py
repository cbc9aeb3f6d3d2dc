"""Shared memory of a pool node: anonymous segments of slots, mapped by every local worker.

A segment is a sealed memfd: it has no name, so nothing is left behind when its node is killed,
and it cannot be resized under a mapping (`docs/adr/0005-shared-memory.md`). One more memfd holds
the generation of every slot (u64 each), so that a reader sees that a slot was taken for another
use without asking.

    segment 0: | slot 0 | slot 1 | ... | slot S-1 |     S = slots_per_segment
    segment 1: | slot S | ...
    last one:  | generation of slot 0 | generation of slot 1 | ...
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, WireError
from core.ids import SlotHandle

_GENERATION_BYTES = 8
_RESERVE_BYTES = 256 << 20
"""Left to the rest of the host when a pool is checked against the available memory."""

MAX_SEGMENTS = 200
"""All descriptors travel in one message; the kernel takes at most 253."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How slots lie in segments. `slot_bytes` is a whole number of `num_layers` slices."""

    num_slots: int
    slot_bytes: int
    num_layers: int
    slots_per_segment: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.slot_bytes // self.num_layers

    @property
    def num_segments(self) -> int:
        """Segments of slots; the table of generations comes beside them."""
        return -(-self.num_slots // self.slots_per_segment)

    def __contains__(self, handle: SlotHandle) -> bool:
        """Whether there is such a slot at all."""
        index = handle.segment * self.slots_per_segment + handle.slot
        return (
            handle.segment >= 0
            and 0 <= handle.slot < self.slots_per_segment
            and index < self.num_slots
        )

    def index(self, handle: SlotHandle) -> int:
        """Return the slot's number in the whole node. Raises `WireError` when out of bounds."""
        if handle not in self:
            raise WireError(f"no slot {handle.slot} in segment {handle.segment}")
        return handle.segment * self.slots_per_segment + handle.slot

    def segment_slots(self, segment: int) -> int:
        """Return how many slots lie in `segment`; the last one may be shorter."""
        return min(self.slots_per_segment, self.num_slots - segment * self.slots_per_segment)


def make_layout(num_slots: int, slot_bytes: int, num_layers: int, segment_bytes: int) -> Layout:
    """Lay slots out in segments of at most `segment_bytes`. Raises `ConfigError`."""
    if min(num_slots, slot_bytes, num_layers) < 1:
        raise ConfigError("num_slots, slot_bytes and num_layers of a pool node must be positive")
    if slot_bytes % num_layers:
        raise ConfigError(f"slot_bytes {slot_bytes} is no multiple of num_layers {num_layers}")
    if segment_bytes < slot_bytes:
        raise ConfigError(f"segment_bytes {segment_bytes} is below slot_bytes {slot_bytes}")
    layout = Layout(num_slots, slot_bytes, num_layers, segment_bytes // slot_bytes)
    if layout.num_segments > MAX_SEGMENTS:
        raise ConfigError(
            f"{layout.num_segments} segments are above {MAX_SEGMENTS}: raise segment_bytes to "
            f"{-(-num_slots // MAX_SEGMENTS) * slot_bytes}"
        )
    return layout


class Segments:
    """The mapped slots of one pool node's life. Views keep the mapping alive after `close`."""

    def __init__(self, layout: Layout, fds: Sequence[int]) -> None:
        """Map `fds` (segments, then generations). The caller still owns the descriptors.

        Raises `WireError` when a descriptor is smaller than the layout says.
        """
        self.layout = layout
        sizes = [
            layout.segment_slots(i) * layout.slot_bytes for i in range(layout.num_segments)
        ] + [layout.num_slots * _GENERATION_BYTES]
        if len(fds) != len(sizes):
            raise WireError(f"{len(sizes)} segments were announced, {len(fds)} came")
        for fd, size in zip(fds, sizes, strict=True):
            if os.fstat(fd).st_size != size:
                raise WireError(f"a segment of {size} bytes has {os.fstat(fd).st_size}")
        self._maps = [mmap.mmap(fd, size) for fd, size in zip(fds, sizes, strict=True)]
        self.generations = memoryview(self._maps[-1]).cast("Q")
        self._views = [memoryview(m) for m in self._maps[:-1]]

    def close(self) -> None:
        """Unmap what nobody looks at; the rest goes with its last view. Slots are gone for us."""
        for view in (*self._views, self.generations):
            view.release()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):  # somebody still looks
                mapped.close()
        self._maps.clear()
        self._views.clear()

    def slot(self, index: int) -> memoryview:
        """Return the bytes of a slot, `slot_bytes` long and writable."""
        segment, slot = divmod(index, self.layout.slots_per_segment)
        start = slot * self.layout.slot_bytes
        return self._views[segment][start : start + self.layout.slot_bytes]

    def slice(self, index: int, layer: int) -> memoryview:
        """Return one layer of a slot. Raises `WireError` when there is no such layer."""
        layout = self.layout
        if not 0 <= layer < layout.num_layers:
            raise WireError(f"there is no layer {layer} of {layout.num_layers}")
        segment, slot = divmod(index, layout.slots_per_segment)
        start = slot * layout.slot_bytes + layer * layout.slice_bytes
        return self._views[segment][start : start + layout.slice_bytes]

    def slices(self, index: int) -> list[memoryview]:
        """Return the slot's bytes by layer."""
        view, step = self.slot(index), self.layout.slice_bytes
        return [view[i : i + step] for i in range(0, view.nbytes, step)]


def create_segments(layout: Layout) -> list[int]:
    """Create the memfds of a pool node, sealed in size. The caller closes the descriptors."""
    sizes = [layout.segment_slots(i) * layout.slot_bytes for i in range(layout.num_segments)]
    fds: list[int] = []
    try:
        for size in [*sizes, layout.num_slots * _GENERATION_BYTES]:
            fds.append(os.memfd_create("halfmoon-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, seals)
    except OSError:
        close_all(fds)
        raise
    return fds


def allocate(fd: int, start: int, num_bytes: int) -> None:
    """Back a range of a segment with memory now. Safe beside readers and writers of its slots.

    Raises `OSError` when the memory is not there, where a first touch would be a fatal signal.
    """
    os.posix_fallocate(fd, start, num_bytes)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def check_memory(need_bytes: int, *, root: Path = Path("/")) -> None:
    """Refuse a pool that does not fit. Raises `ConfigError` with the numbers and the fix."""
    available_bytes, source = available_memory(root)
    if need_bytes + _RESERVE_BYTES > available_bytes:
        raise ConfigError(
            f"the pool needs {need_bytes >> 20} MiB and {_RESERVE_BYTES >> 20} MiB are kept free, "
            f"but {source} leaves {available_bytes >> 20} MiB: make the pool at most "
            f"{max(0, available_bytes - _RESERVE_BYTES) >> 20} MiB or free memory"
        )


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that can still be taken, and what limits them.

    The least of MemAvailable and the room in every memory cgroup (v2 or v1) above this process.
    """
    meminfo = (root / "proc/meminfo").read_text()
    kib = next(int(line.split()[1]) for line in meminfo.splitlines() if "MemAvailable" in line)
    limits = [(kib << 10, "MemAvailable")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / limit).exists():
                text = (folder / limit).read_text().strip()
                if text != "max":
                    room = int(text) - int((folder / usage).read_text())
                    limits.append((max(0, room), f"the memory limit of cgroup {folder}"))
    return min(limits)
