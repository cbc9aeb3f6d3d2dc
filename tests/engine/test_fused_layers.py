"""Whole decoder layers in one call: taken only where they compute the same."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from transformers import Qwen2Config

from engine.attention import ATTENTION_NAME, KernelStep, UnsupportedAttentionError, make_tables
from engine.base import ModelSpec, SequenceStep
from engine.cache import PagedCache
from engine.fused_layers import FusedLayer, replace_layers
from tests.engine.test_kernels import ISAS, kernels_or_skip
from tests.engine.tiny_models import CONFIGS, VOCAB, build

BLOCK_SIZE = 4
QWEN2 = Qwen2Config(
    **{
        key: getattr(CONFIGS["llama"], key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                    "num_key_value_heads", "initializer_range")
    },
    num_hidden_layers=2,
)  # fmt: skip
MODELS = {**CONFIGS, "qwen2": QWEN2}
FUSED = ("llama", "qwen3", "mistral", "qwen2")


def paged(config):
    model = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # all 0 or 1 when made: told from none by nobody
            torch.nn.init.normal_(parameter, mean=1.0)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def spec_of(model):
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSpec(
        "f", config.num_hidden_layers, config.num_key_value_heads, head_dim, "float32", 4,
        BLOCK_SIZE, VOCAB, max_model_len=64, eos_token_ids=(),
    )  # fmt: skip


@torch.inference_mode()
def logits(model, kernels, spec, layer_done=None):
    """Two prompts of different lengths, then one more token of each, over one paged cache."""
    cache = PagedCache(spec, 32, torch.float32, torch.device("cpu"))
    outputs = []
    for lengths in (((0, 30), (0, 7)), ((30, 1), (7, 1))):
        sequences = [
            SequenceStep([0] * new, start, range(16 * index, 16 * index + 16))
            for index, (start, new) in enumerate(lengths)
        ]
        step = KernelStep(cache, make_tables(sequences, BLOCK_SIZE, 32), kernels, layer_done)
        positions = torch.cat([torch.arange(start, start + new) for start, new in lengths])
        tokens = (positions * 7 + 3) % VOCAB
        output = model(
            tokens[None], position_ids=positions[None], use_cache=False, halfmoon_step=step
        )
        outputs.append(output.logits[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_one_call_give_the_same_logits(name, isa):
    model, kernels = paged(MODELS[name]), kernels_or_skip(isa)
    spec = spec_of(model)
    expected = logits(model, kernels, spec)
    replace_layers(model, kernels, spec)
    fused = [isinstance(layer, FusedLayer) for layer in model.model.layers]
    assert fused == [name in FUSED] * spec.num_layers
    told: list[int] = []
    assert torch.allclose(logits(model, kernels, spec, told.append), expected, atol=1e-3)
    assert told == [*range(spec.num_layers)] * 2


def double_the_residual(layer):
    forward = type(layer).forward

    def changed(self, hidden_states, **kwargs):
        return forward(self, hidden_states, **kwargs) + hidden_states

    layer.forward = MethodType(changed, layer)


def norm_the_values(layer):
    layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: out / out.std())


def drop_the_query_norm(layer):
    layer.self_attn.q_norm = torch.nn.Identity()
    layer.self_attn.q_norm.register_forward_hook(lambda module, args, out: 2.0 * out)


@pytest.mark.parametrize("change", [double_the_residual, norm_the_values, drop_the_query_norm])
def test_a_layer_that_computes_something_else_stays(change):
    model, kernels = paged(CONFIGS["qwen3"]), kernels_or_skip("generic")
    change(model.model.layers[1])
    replace_layers(model, kernels, spec_of(model))
    assert [type(layer).__name__ for layer in model.model.layers] == [
        "FusedLayer",
        "Qwen3DecoderLayer",
    ]


def test_a_mask_is_refused():
    model, kernels = paged(CONFIGS["llama"]), kernels_or_skip("generic")
    replace_layers(model, kernels, spec_of(model))
    x = torch.zeros(1, 1, 48)
    with pytest.raises(UnsupportedAttentionError, match="attention_mask"):
        model.model.layers[0](x, attention_mask=x, position_embeddings=(x, x), halfmoon_step=None)
