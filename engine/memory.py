"""Large host memory for weights and cache: zeroed, lazily paged in, on huge pages where allowed."""

from __future__ import annotations

import mmap

import torch


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
