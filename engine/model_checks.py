"""Which models cannot be served, told from `config.json` alone and without importing torch.

The engine needs a decoder-only text model in which every layer keeps its own K and V, all of one
shape, and whose attention goes through transformers' attention interface.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import ConfigError

Config = Mapping[str, Any]

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

# Families whose configurations need not say what they are.
_STATE_SPACE = (
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe "
    "lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next "
    "recurrent_gemma rwkv xlstm zamba zamba2 zaya"
)
_LATENT = "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite longcat_flash minicpm3"
_SHARED_KV = "gemma3n gemma4 gemma4_unified"

_STATE_SPACE_KEYS = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "linear_num_key_heads")
_PER_LAYER_KEYS = ("num_key_value_heads", "num_attention_heads", "head_dim", "block_configs")
_SECOND_SHAPES = {
    "v_head_dim": "head_dim",
    "global_head_dim": "head_dim",
    "swa_head_dim": "head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
    "num_global_key_value_heads": "num_key_value_heads",
}
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})


class ModelRefused(ConfigError):  # noqa: N818 (the reason is the message)
    """This model cannot be served. The message says why and what would be right."""


def refusal_reason(config: Config) -> str | None:
    """Say why a model with this `config.json` cannot run and what would be right; None if it can.

    The most telling reason comes first: a multimodal model is called that, rather than unknown.
    """
    checks: tuple[Callable[[Config], str | None], ...] = (
        _no_model_type,
        _multimodal,
        _encoder_decoder,
        _encoder,
        _latent_attention,
        _state_space,
        _shared_kv,
        _uneven_layers,
        _unknown_architecture,
        _own_attention,
        _quantised,
        _no_context,
    )
    return next((reason for check in checks if (reason := check(config)) is not None), None)


def _no_model_type(config: Config) -> str | None:
    if isinstance(config.get("model_type"), str):
        return None
    return "its config.json names no `model_type`; give a transformers model folder"


def _encoder_decoder(config: Config) -> str | None:
    to_sequence = transformers_table("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    if not config.get("is_encoder_decoder", config["model_type"] in to_sequence):
        return None
    return _only(f"{config['model_type']} is an encoder-decoder model")


def _encoder(config: Config) -> str | None:
    masked = transformers_table("MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    if config["model_type"] not in masked or config.get("is_decoder"):
        return None
    return _only(f"{config['model_type']} is an encoder, which looks both ways")


def _multimodal(config: Config) -> str | None:
    parts = [key for key in config if key.endswith("_config") and isinstance(config[key], Mapping)]
    senses = [
        key for key in parts if key.startswith(("vision", "audio", "text", "image", "speech"))
    ]
    senses += [key for key in ("mm_vision_tower", "image_token_id") if key in config]
    if senses:
        return _only(f"{config['model_type']} is a multimodal model (it has `{senses[0]}`)")
    models = [key for key in parts if "model_type" in config[key]]
    if models:
        return _only(f"{config['model_type']} is made of several models (it has `{models[0]}`)")
    return None


def _latent_attention(config: Config) -> str | None:
    if not (config.get("kv_lora_rank") or _is_one_of(config, _LATENT)):
        return None
    return _only(f"{config['model_type']} keeps latent vectors (MLA) in place of K and V")


def _state_space(config: Config) -> str | None:
    kinds = set(config.get("layer_types") or ()) - _ATTENTION_KINDS
    if kinds:
        return _only(f"{config['model_type']} has layers of the kind {', '.join(sorted(kinds))}")
    if _is_one_of(config, _STATE_SPACE) or any(map(config.get, _STATE_SPACE_KEYS)):
        return _only(f"{config['model_type']} has state-space or linear-attention layers")
    return None


def _shared_kv(config: Config) -> str | None:
    shared = config.get("num_kv_shared_layers") or config.get("use_cla")
    if not (shared or _is_one_of(config, _SHARED_KV)):
        return None
    return _only(f"{config['model_type']} shares K and V between layers")


def _uneven_layers(config: Config) -> str | None:
    uneven = [key for key in _PER_LAYER_KEYS if isinstance(config.get(key), list)]
    uneven += [
        key
        for key, usual in _SECOND_SHAPES.items()
        if config.get(key) and config.get(usual) and config[key] != config[usual]
    ]
    if not uneven:
        return None
    return _only(f"{config['model_type']} has K and V of different shapes (`{uneven[0]}`)")


def _unknown_architecture(config: Config) -> str | None:
    model_type = config["model_type"]
    known = transformers_table("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if model_type not in known:
        if "auto_map" in config:
            return (
                f"{model_type} brings its own Python code (`auto_map`), which is never run; give a "
                "model whose architecture transformers itself has"
            )
        return f"the installed transformers has no decoder-only architecture `{model_type}`"
    architectures = config.get("architectures") or [known[model_type]]
    if known[model_type] in architectures:
        return None
    return _only(f"it was saved as {architectures[0]}, which does not generate text")


def _own_attention(config: Config) -> str | None:
    source = _modeling_source(config["model_type"])
    if source is None or "ALL_ATTENTION_FUNCTIONS" in source:
        return None
    return _only(
        f"in transformers {config['model_type']} does its own attention, past the interface that "
        "the paged cache needs"
    )


def _quantised(config: Config) -> str | None:
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if not quantisation:
        return None
    method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else ""
    return f"its weights are quantised ({method}); give float32, bfloat16 or float16 weights"


def _no_context(config: Config) -> str | None:
    context = context_tokens(config)
    if context is not None and context > 0:
        return None
    said = "does not say its context" if context is None else f"has a context of {context} tokens"
    return f"its config.json {said}; set `max_position_embeddings` to a positive number"


def context_tokens(config: Config) -> int | None:
    """Return the context length that the configuration states, None if it states none."""
    found = (config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int))
    return next(found, None)


@cache
def transformers_table(name: str) -> dict[str, str]:
    """Return one of transformers' tables from `model_type` to class.

    Read out of the source text: importing the tables takes ten seconds, and torch.
    """
    tree = ast.parse((_models_folder() / "auto" / "modeling_auto.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                return dict(ast.literal_eval(node.value.args[0]))
    raise RuntimeError(f"transformers no longer keeps {name} where it used to be")


def _is_one_of(config: Config, names: str) -> bool:
    return str(config["model_type"]).removesuffix("_text") in names.split()


def _modeling_source(model_type: str) -> str | None:
    """Return the source of the architecture, None where its file has another name."""
    name = model_type.replace("-", "_").removesuffix("_text")
    path = _models_folder() / name / f"modeling_{name}.py"
    return path.read_text() if path.is_file() else None


def _models_folder() -> Path:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed")
    return Path(spec.origin).parent / "models"


def _only(problem: str) -> str:
    return (
        f"{problem}; Halfmoon serves decoder-only text models in which every layer has its own K "
        "and V of one shape, such as Llama, Qwen3, Mistral, Gemma 2 or Gemma 3 (text)"
    )
