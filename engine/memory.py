"""Large host memory for weights and cache: zeroed, lazily paged in, on huge pages where allowed."""

from __future__ import annotations

import mmap

import torch


def host_bytes(num_bytes: int) -> tuple[torch.Tensor, memoryview]:
    """Return `num_bytes` of zeroed memory as a uint8 tensor and as a writable view of the same.

    The memory goes back when neither the tensor, nor the view, nor anything made from them is
    left. Weights and KV are streamed through; with 4 KiB pages the address translation is a
    noticeable part of that.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes), view[:num_bytes]
