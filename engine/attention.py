"""Paged attention behind transformers' attention interface.

The model's own attention layers call `paged_attention`, and the keyword argument
`halfmoon_step` that the engine gives to the model's forward arrives here. It holds the step's block
tables; it writes K and V into the paged cache and attends through the tables. No mask is ever
built: transformers makes none for an implementation without a registered mask function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from core.errors import InvariantError
from engine.base import LayerDone, SequenceStep
from engine.cache import PagedCache
from engine.kernels import AttentionCall, Kernels, LayerWeights

ATTENTION_NAME = "halfmoon_paged"

Int32s = npt.NDArray[np.int32]


class UnsupportedAttentionError(Exception):
    """A layer asks for attention of a kind that the paged cache cannot give."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer hands over: q `[heads, tokens, head_dim]`, k and v `[kv_heads, tokens, ...]`.

    `window`: a token sees itself and the `window - 1` before it; 0 means all. `softcap` 0 is off.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What distinguishes a layer's attention from another's; see `LayerInputs`."""

    layer: int
    num_heads: int
    scale: float
    window: int
    softcap: float


class AttentionStep(Protocol):
    """One forward pass as the attention layers see it."""

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Return the layer's output, `[tokens, heads, head_dim]`."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    halfmoon_step: AttentionStep | None = None,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer, on `[1, heads, tokens, dim]`."""
    if halfmoon_step is None:
        raise UnsupportedAttentionError("its attention gets no keyword arguments")
    wanted = [name for name in ("s_aux", "position_bias") if extras.get(name) is not None]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if wanted:
        raise UnsupportedAttentionError(f"attention with {', '.join(wanted)}")
    inputs = LayerInputs(
        layer=module.layer_idx,  # type: ignore[arg-type]
        q=query[0],
        k=key[0],
        v=value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return halfmoon_step.attend(inputs)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class StepTables:
    """The sequences of a step, flat: what the kernel reads. All int32, on the host.

    Sequence s has tokens `query_start[s]` to `query_start[s + 1]` of the packed step, at positions
    from `position_start[s]`; its block table starts at `block_table[table_start[s]]`.
    """

    query_start: Int32s
    position_start: Int32s
    table_start: Int32s
    block_table: Int32s


def make_tables(sequences: Sequence[SequenceStep], block_size: int, num_blocks: int) -> StepTables:
    """Flatten the block tables of `sequences`; refuses tables that do not cover their tokens."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    used = [
        -(-(sequence.start + length) // block_size)
        for sequence, length in zip(sequences, lengths, strict=True)
    ]
    for sequence, length, blocks in zip(sequences, lengths, used, strict=True):
        if length == 0 or sequence.start < 0 or blocks > len(sequence.block_ids):
            raise InvariantError(
                f"{length} tokens from position {sequence.start} do not fit a table of "
                f"{len(sequence.block_ids)} blocks"
            )
    ids = [
        block_id
        for sequence, blocks in zip(sequences, used, strict=True)
        for block_id in sequence.block_ids[:blocks]
    ]
    block_table = np.array(ids, dtype=np.int32)
    if block_table.min() < 0 or block_table.max() >= num_blocks:
        raise InvariantError(f"a block table names a block outside 0..{num_blocks - 1}")
    return StepTables(
        query_start=np.cumsum([0, *lengths], dtype=np.int32),
        position_start=np.array([sequence.start for sequence in sequences], dtype=np.int32),
        table_start=np.cumsum([0, *used[:-1]], dtype=np.int32),
        block_table=block_table,
    )


class KernelStep:
    """Attention by the C kernel: float32 on the CPU; blocks are read in place."""

    def __init__(
        self,
        cache: PagedCache,
        tables: StepTables,
        kernels: Kernels,
        layer_done: LayerDone | None,
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._kernels = kernels
        self._layer_done = layer_done
        self._layer_bytes = cache.spec.layer_slice_bytes
        self._scratch = torch.empty(0)
        self._call = AttentionCall(
            query_start=tables.query_start.ctypes.data,
            position_start=tables.position_start.ctypes.data,
            table_start=tables.table_start.ctypes.data,
            block_table=tables.block_table.ctypes.data,
            block_stride=cache.blocks.stride(0),
            num_sequences=len(tables.position_start),
            num_kv_heads=cache.spec.num_kv_heads,
            head_dim=cache.spec.head_dim,
            block_size=cache.spec.block_size,
            num_threads=kernels.num_threads,
        )

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Write K and V and attend, in one call."""
        q, k, v = (_unit_stride(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
        out = torch.empty(q.shape[1], q.shape[0], q.shape[2])
        settings = LayerSettings(
            inputs.layer, q.shape[0], inputs.scale, inputs.window, inputs.softcap
        )
        call = self._set(settings)
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.q_head_stride, call.q_token_stride, _ = q.stride()
        call.k_head_stride, call.k_token_stride, _ = k.stride()
        call.v_head_stride, call.v_token_stride, _ = v.stride()
        self._kernels.attention(call)
        if self._layer_done is not None:
            self._layer_done(inputs.layer)
        return out

    def run_layer(
        self,
        settings: LayerSettings,
        weights: LayerWeights,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Run a whole decoder layer over `x` [tokens, hidden]; see `Kernels.layer`."""
        num_floats = len(x) * weights.scratch_floats
        if len(self._scratch) < num_floats:
            self._scratch = torch.empty(num_floats)
        y = self._kernels.layer(weights, self._set(settings), x, rotation, self._scratch)
        if self._layer_done is not None:
            self._layer_done(settings.layer)
        return y

    def _set(self, settings: LayerSettings) -> AttentionCall:
        call = self._call
        call.cache = self._cache.blocks.data_ptr() + settings.layer * self._layer_bytes
        call.num_heads = settings.num_heads
        call.scale, call.softcap, call.window = settings.scale, settings.softcap, settings.window
        return call


class TorchStep:
    """Attention by torch alone, for any device and dtype: correct, and not the fast path.

    Each sequence's context is gathered per layer, and the sequences are worked on one by one.
    """

    def __init__(self, cache: PagedCache, tables: StepTables, layer_done: LayerDone | None) -> None:
        self._cache = cache
        self._layer_done = layer_done
        device = cache.blocks.device
        block_size = cache.spec.block_size
        starts = tables.query_start
        self._spans = [
            (int(start), int(end), int(position))
            for start, end, position in zip(
                starts[:-1], starts[1:], tables.position_start, strict=True
            )
        ]
        self._tables = [
            torch.from_numpy(part.astype(np.int64)).to(device)
            for part in np.split(tables.block_table, tables.table_start[1:])
        ]
        positions = [
            torch.arange(position, position + end - start, device=device)
            for start, end, position in self._spans
        ]
        self._token_blocks = torch.cat(
            [table[p // block_size] for table, p in zip(self._tables, positions, strict=True)]
        )
        self._token_offsets = torch.cat(positions) % block_size

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Write K and V, then attend sequence by sequence."""
        layer = self._cache.blocks[:, inputs.layer]
        for index, new in enumerate((inputs.k, inputs.v)):
            layer[:, index][self._token_blocks, :, self._token_offsets] = new.transpose(0, 1)
        outputs = [
            self._attend_one(inputs, layer[table], start, end, position)
            for table, (start, end, position) in zip(self._tables, self._spans, strict=True)
        ]
        if self._layer_done is not None:
            self._layer_done(inputs.layer)
        return torch.cat(outputs)

    def _attend_one(
        self, inputs: LayerInputs, blocks: torch.Tensor, start: int, end: int, position: int
    ) -> torch.Tensor:
        """Attend for one sequence; `blocks` is `[blocks, 2, kv_heads, block_size, head_dim]`."""
        context = position + end - start
        kv = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        q = inputs.q[:, start:end]
        group = q.shape[0] // kv.shape[1]
        k, v = (part.repeat_interleave(group, dim=0) for part in kv)
        seen = torch.arange(context, device=q.device)
        now = torch.arange(position, context, device=q.device)[:, None]
        visible = seen <= now
        if inputs.window:
            visible = visible & (seen > now - inputs.window)
        if inputs.softcap:
            logits = (q @ k.transpose(1, 2)).float() * inputs.scale
            logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
            weights = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1).to(v.dtype)
            capped: torch.Tensor = weights @ v
            return capped.transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=inputs.scale
        )
        return out[0].transpose(0, 1)


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
