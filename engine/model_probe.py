"""What a loaded model is: whether the paged cache can serve it, and the shape of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from core.errors import ConfigError
from engine.attention import LayerInputs, UnsupportedAttentionError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The one K and V shape that all layers of a model share."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def check_config(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse by name what the configuration already tells; `ConfigError` says what and why."""
    name = config.model_type
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: encoder-decoder models are not supported")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(f"{name}: layers that share K and V with others are not supported")
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise ConfigError(f"{name}: attention to later tokens is not supported")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ConfigError(f"{name}: layers of type {', '.join(unknown)} are not supported")
    if rope := sorted(_rope_types(text) & _BATCH_DEPENDENT_ROPE):
        raise ConfigError(
            f"{name}: {', '.join(rope)} position embeddings change with the lengths in the batch, "
            "which a shared KV cache cannot serve"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ConfigError(f"max_model_len {max_model_len} is more than {name}'s own {limit}")


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
    except (UnsupportedAttentionError, TypeError) as error:
        raise ConfigError(f"{name} cannot use a paged KV cache: {error}") from error
    text = model.config.get_text_config()
    if [inputs.layer for inputs in probe.seen] != list(range(text.num_hidden_layers)):
        raise ConfigError(f"{name}: not every layer has standard attention of its own")
    _check_windows(name, getattr(text, "layer_types", None) or (), probe.seen)
    shapes = {(*inputs.k.shape, *inputs.v.shape) for inputs in probe.seen}
    if len(shapes) != 1:
        raise ConfigError(f"{name}: the layers' K and V differ in shape: {sorted(shapes)}")
    first = probe.seen[0]
    if not first.q.shape[2] == first.k.shape[2] == first.v.shape[2]:
        raise ConfigError(f"{name}: K and V heads of different sizes (MLA) are not supported")
    return LayerShape(len(probe.seen), first.k.shape[0], first.k.shape[2])


def _check_windows(name: str, layer_types: Iterable[str], seen: Iterable[LayerInputs]) -> None:
    """A sliding layer that keeps its window to itself would silently attend to everything."""
    for layer_type, inputs in zip(layer_types, seen, strict=False):
        if layer_type == "sliding_attention" and not inputs.window:
            raise ConfigError(f"{name}: layer {inputs.layer} does not tell its sliding window")


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-sequence ids: the generation configuration's, else the model configuration's."""
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def fingerprint(model_dir: Path) -> str:
    """Hex digest of the configuration and the weights, the same on every host."""
    digest = blake2b(digest_size=32)
    for path in [model_dir / "config.json", *sorted(model_dir.glob("*.safetensors"))]:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()
