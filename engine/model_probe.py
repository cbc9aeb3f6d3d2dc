"""What a loaded model is: whether the paged cache can serve it, and the shape of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import LayerInputs, UnsupportedAttentionError
from engine.model_checks import ModelRefused

_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The one K and V shape that all layers of a model share."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what `engine.models` lets pass and only a look at the whole configuration tells."""
    name = config.model_type
    if getattr(config, "use_bidirectional_attention", None) or not getattr(
        config, "is_causal", True
    ):
        raise ModelRefused(f"{name}: attention to later tokens is not supported")
    if rope := sorted(_rope_types(config) & _BATCH_DEPENDENT_ROPE):
        raise ModelRefused(
            f"{name}: {', '.join(rope)} position embeddings change with the lengths in the batch, "
            "which a shared KV cache cannot serve"
        )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", "default")) for entry in (parameters, *nested)}


class _ProbeStep:
    """Records what each layer asks for and answers with zeros."""

    def __init__(self) -> None:
        self.seen: list[LayerInputs] = []

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Record `inputs`."""
        self.seen.append(inputs)
        heads, tokens, _ = inputs.q.shape
        return inputs.q.new_zeros(tokens, heads, inputs.v.shape[-1])


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> LayerShape:
    """Run one token through the model and look at what its layers hand to attention.

    Refuses models whose layers do not each have their own K and V of one shape.
    """
    name = model.config.model_type
    probe = _ProbeStep()
    one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=one, position_ids=one, use_cache=False, halfmoon_step=probe)
    except (UnsupportedAttentionError, TypeError, AttributeError) as error:  # no mask to work on
        raise ModelRefused(f"{name} cannot use a paged KV cache: {error}") from error
    if [inputs.layer for inputs in probe.seen] != list(range(model.config.num_hidden_layers)):
        raise ModelRefused(f"{name}: not every layer has standard attention of its own")
    _check_windows(name, getattr(model.config, "layer_types", None) or (), probe.seen)
    shapes = {(*inputs.k.shape, *inputs.v.shape) for inputs in probe.seen}
    if len(shapes) != 1:
        raise ModelRefused(f"{name}: the layers' K and V differ in shape: {sorted(shapes)}")
    first = probe.seen[0]
    if not first.q.shape[2] == first.k.shape[2] == first.v.shape[2]:
        raise ModelRefused(f"{name}: K and V heads of different sizes (MLA) are not supported")
    return LayerShape(len(probe.seen), first.k.shape[0], first.k.shape[2])


def _check_windows(name: str, layer_types: Iterable[str], seen: Iterable[LayerInputs]) -> None:
    """A sliding layer that keeps its window to itself would silently attend to everything."""
    for layer_type, inputs in zip(layer_types, seen, strict=False):
        if layer_type == "sliding_attention" and not inputs.window:
            raise ModelRefused(f"{name}: layer {inputs.layer} does not tell its sliding window")
