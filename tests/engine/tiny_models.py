"""Tiny random-weight models of several architectures, made on the spot, and their references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB = 101

# Weights far from zero, so that the logits of random models are far apart.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    **_COMMON,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 20,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, num_hidden_layers=2),
    "qwen3": Qwen3Config(**_COMMON, num_hidden_layers=2, head_dim=32),
    "mistral": MistralConfig(**_COMMON, num_hidden_layers=2, head_dim=16, sliding_window=20),
    "gemma2": Gemma2Config(**_GEMMA, num_hidden_layers=3, attn_logit_softcapping=20.0),
    "gemma3": Gemma3TextConfig(
        **_GEMMA,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model in float32 with eager attention, the reference."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save it as a model folder that the engine accepts; the tokenizer is never used."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What `generate` gives, past end tokens too (`min_new_tokens` would forbid them)."""
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    output: torch.Tensor = model.generate(  # type: ignore[operator] # a mixin mypy cannot see
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
