"""Whole decoder layers of the Llama pattern as one C call each: float32 on the CPU.

A decode step of a small model spends a tenth of its time on Python and on torch's small
operations; a layer that runs in one call spends none. A stand-in is taken only for the classes
named here, whose source was read, and only after its output and what it wrote into the cache
agreed with the original layer on random input. Every other layer stays as it is.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention import (
    KernelStep,
    LayerInputs,
    LayerSettings,
    UnsupportedAttentionError,
    make_tables,
)
from engine.base import ModelSpec, SequenceStep
from engine.cache import PagedCache
from engine.kernels import Kernels, LayerWeights, NormWeights
from engine.memory import FloatArena
from engine.packed_modules import (
    FusedGatedMLP,
    FusedRMSNorm,
    PackedLinear,
    fused_mlp,
    fused_norm,
    plain_linear,
    same_up_to_rounding,
)

FUSED_CLASSES = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)


class FusedLayer(nn.Module):
    """norm, q k v, rotation, paged attention, projection, norm and gated MLP with both residuals.

    Holds the packed parts and calls `KernelStep.run_layer` with pointers into them.
    """

    def __init__(
        self,
        settings: LayerSettings,
        linears: tuple[PackedLinear, PackedLinear],
        norms: tuple[FusedRMSNorm, FusedRMSNorm | None, FusedRMSNorm | None, FusedRMSNorm],
        mlp: FusedGatedMLP,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._parts = nn.ModuleList([*linears, *(norm for norm in norms if norm), mlp])
        linear_pointers = (part.pointers for part in (*linears, mlp.gate_up, mlp.down))
        norm_pointers = (norm.pointers if norm else NormWeights() for norm in norms)
        self._weights = LayerWeights(*linear_pointers, *norm_pointers)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        halfmoon_step: KernelStep,
        **_: object,
    ) -> torch.Tensor:
        """Map `[1, tokens, hidden]` to the same shape, as the original layer does."""
        if attention_mask is not None:
            raise UnsupportedAttentionError("attention with attention_mask")
        cos, sin = position_embeddings
        return halfmoon_step.run_layer(
            self._settings,
            self._weights,
            hidden_states[0].contiguous(),
            (cos[0].contiguous(), sin[0].contiguous()),
        )[None]


def replace_layers(model: PreTrainedModel, kernels: Kernels, spec: ModelSpec) -> None:
    """Put `FusedLayer` in the place of every decoder layer that it can stand in for.

    Weights are freed as they are packed.
    """
    arena, trial = FloatArena(), _Trial(kernels, spec)
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            if type(layer).__name__ in FUSED_CLASSES:
                stand_in = _fused_layer(layer, kernels, arena, trial)
                if stand_in is not None:
                    layers[index] = stand_in


class _RecordingStep(KernelStep):
    """Attends as usual, and remembers what the layers asked for."""

    seen: tuple[LayerInputs, ...] = ()

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Attend and remember."""
        self.seen = (*self.seen, inputs)
        return super().attend(inputs)


class _Trial:
    """Runs layers on the same random input: a new sequence, and one with a past in the cache."""

    def __init__(self, kernels: Kernels, spec: ModelSpec) -> None:
        size = spec.block_size
        lengths = ((0, 3), (size + 1, 4))
        needed = [-(-(start + new) // size) for start, new in lengths]
        tables = (range(needed[0]), range(needed[0], sum(needed)))
        sequences = [
            SequenceStep([0] * new, start, table)
            for (start, new), table in zip(lengths, tables, strict=True)
        ]
        self._kernels = kernels
        self._tables = make_tables(sequences, size, sum(needed))
        self._cache = PagedCache(spec, sum(needed), torch.float32, torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def run(self, layer: nn.Module, hidden: int) -> tuple[object, torch.Tensor, _RecordingStep]:
        """Return the output of `layer`, the cache afterwards, and what it asked for."""
        generator = self._generator.manual_seed(0)
        num_tokens = int(self._tables.query_start[-1])
        self._cache.blocks.normal_(generator=generator)
        x = torch.randn(1, num_tokens, hidden, generator=generator)
        head_dim = self._cache.spec.head_dim
        cos, sin = torch.randn(2, 1, num_tokens, head_dim, generator=generator)
        step = _RecordingStep(self._cache, self._tables, self._kernels, None)
        output = layer(x, attention_mask=None, position_embeddings=(cos, sin), halfmoon_step=step)
        return output, self._cache.blocks.clone(), step


def _fused_layer(
    layer: nn.Module, kernels: Kernels, arena: FloatArena, trial: _Trial
) -> FusedLayer | None:
    attention = layer.get_submodule("self_attn")
    q, k, v, out = (
        plain_linear(getattr(attention, name, None))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    if q is None or k is None or v is None or out is None:
        return None
    if len({linear.bias is None for linear in (q, k, v)}) > 1:
        return None
    input_norm, mlp_norm = (
        fused_norm(layer.get_submodule(name), kernels)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    q_norm, k_norm = (
        fused_norm(norm, kernels) if norm is not None else None
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    )
    mlp = fused_mlp(layer.get_submodule("mlp"), kernels, arena)
    if input_norm is None or mlp_norm is None or mlp is None:
        return None
    expected, expected_cache, step = trial.run(layer, q.in_features)
    (asked,) = step.seen
    stand_in = FusedLayer(
        LayerSettings(asked.layer, len(asked.q), asked.scale, asked.window, asked.softcap),
        (PackedLinear([q, k, v], kernels, arena), PackedLinear([out], kernels, arena)),
        (input_norm, q_norm, k_norm, mlp_norm),
        mlp,
    )
    output, cache, _ = trial.run(stand_in, q.in_features)
    agrees = (
        isinstance(output, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and same_up_to_rounding(output, expected)
        and same_up_to_rounding(cache, expected_cache)
    )
    return stand_in if agrees else None
