"""The paged KV cache's memory, on the host or on a device."""

from __future__ import annotations

import threading

import torch

from core.errors import ConfigError
from engine.base import ModelSpec
from engine.memory import host_bytes, page_in


class PagedCache:
    """One tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    A block is contiguous and equals the wire layout; one layer of a block is one slice of it. On
    the host, reads are views of the cache itself, which is paged in beside the first use; on a
    device, copies through pinned memory.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (
            *(num_blocks, spec.num_layers, 2),
            *(spec.num_kv_heads, spec.block_size, spec.head_dim),
        )
        self._closing = threading.Event()
        self._view: memoryview | None = None
        self._pinned: torch.Tensor | None = None
        if device.type == "cpu":
            memory, self._view = _reserve(num_blocks * spec.block_bytes)
            self.blocks = memory.view(dtype).view(shape)
            threading.Thread(
                target=page_in, args=(self._view, self._closing), name="page-in", daemon=True
            ).start()
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
            self._pinned = torch.empty(spec.block_bytes, dtype=torch.uint8, pin_memory=True)

    def read(self, block_id: int, first_byte: int, num_bytes: int) -> memoryview:
        """Bytes of a block from `first_byte`, read-only: a view on the host, else a copy."""
        self._check(block_id)
        if self._view is not None:
            start = block_id * self.spec.block_bytes + first_byte
            return self._view[start : start + num_bytes].toreadonly()
        part = self._block_bytes(block_id)[first_byte : first_byte + num_bytes]
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(part)
        return memoryview(host.numpy().data).toreadonly()

    def write(self, block_id: int, data: memoryview) -> None:
        """Replace a whole block; `data` is `block_bytes` long."""
        self._check(block_id)
        source = data.cast("B")
        if len(source) != self.spec.block_bytes:
            raise ValueError(f"{len(source)} bytes for a block of {self.spec.block_bytes}")
        if self._view is not None:
            start = block_id * self.spec.block_bytes
            self._view[start : start + len(source)] = source
            return
        assert self._pinned is not None
        self._pinned.numpy().data[:] = source
        self._block_bytes(block_id).copy_(self._pinned)

    def zero(self, block_id: int) -> None:
        """Fill a block with zeros."""
        self._check(block_id)
        self.blocks[block_id].zero_()

    def close(self) -> None:
        """Stop paging in; the memory goes with the last view of it."""
        self._closing.set()

    def _block_bytes(self, block_id: int) -> torch.Tensor:
        return self.blocks[block_id].view(-1).view(torch.uint8)

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")


def _reserve(num_bytes: int) -> tuple[torch.Tensor, memoryview]:
    try:
        return host_bytes(num_bytes)
    except OSError as error:
        raise ConfigError(
            f"no memory for the cache of {num_bytes / 2**30:.1f} GiB: lower num_blocks ({error})"
        ) from error
