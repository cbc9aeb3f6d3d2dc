"""Large host memory for weights and cache: zeroed, lazily paged in, on huge pages where allowed."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_PAGE_IN_BYTES = 16 << 20
_PAGE_IN_SHARE = 0.2
"""Of one core's time: the first requests come meanwhile."""


class FloatArena:
    """Hands out float32 memory from large pieces, so that small tensors get huge pages too.

    A piece's memory goes back when nothing made from it is left.
    """

    def __init__(self, piece_floats: int = 1 << 24) -> None:
        self._piece_floats = piece_floats
        self._rest = torch.empty(0, dtype=torch.float32)

    def take(self, num_floats: int) -> torch.Tensor:
        """Return a zeroed vector of `num_floats`, aligned to a cache line."""
        padded = -(-num_floats // 16) * 16
        if padded > len(self._rest):
            memory, _ = host_bytes(4 * max(padded, self._piece_floats))
            self._rest = memory.view(torch.float32)
        part, self._rest = self._rest[:num_floats], self._rest[padded:]
        return part


def host_bytes(num_bytes: int) -> tuple[torch.Tensor, memoryview]:
    """Return `num_bytes` of zeroed memory as a uint8 tensor and as a writable view of the same.

    The memory goes back when neither the tensor, nor the view, nor anything made from them is
    left. Weights and KV are streamed through; with 4 KiB pages the address translation is a
    noticeable part of that. The mapping is private, because shared anonymous memory (Python's
    default) counts as tmpfs to Linux, which gives it no huge pages unless told to.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(num_bytes, 1), **flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes), view[:num_bytes]


def page_in(view: memoryview, stop: threading.Event) -> None:
    """Back a view of `host_bytes` with memory, piece by piece; ends early at `stop`.

    A first touch of fresh memory is many times slower than a copy, and would stall the step or the
    load that comes first. Contents stay as they are, so this may run beside readers and writers.
    It is a hint: what the kernel refuses is paged in when it is used.
    """
    if not view.nbytes:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for start in range(0, view.nbytes, _PAGE_IN_BYTES):
        began_s = time.monotonic()
        madvise(address + start, min(_PAGE_IN_BYTES, view.nbytes - start), _MADV_POPULATE_WRITE)
        if stop.wait((time.monotonic() - began_s) * (1 / _PAGE_IN_SHARE - 1)):
            return
