from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.model_checks import refusal_reason, transformers_table
from engine.models import ModelRefused, inspect_model, memory_needed_bytes

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def tensors(k_rows=16):
    return {
        "model.embed_tokens.weight": np.ones((50, 32), np.float32),
        "model.layers.0.self_attn.k_proj.weight": np.ones((k_rows, 32), np.float16),
        "model.layers.1.self_attn.k_proj.weight": np.ones((k_rows, 32), np.float16),
    }


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def make_model(folder: Path, **changes) -> Path:
    folder.mkdir()
    write_config(folder, **changes)
    save_file(tensors(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_config(folder: Path, **changes) -> None:
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def refused(folder: Path, cache: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        inspect_model(folder, cache)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def test_a_model_is_described(model, cache):
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    info = inspect_model(model, cache)
    assert (info.path, info.architecture, info.model_type) == (model, "LlamaForCausalLM", "llama")
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (2, 2, 8)
    assert (info.vocab_size, info.context_tokens, info.eos_token_ids) == (50, 128, (2, 7))
    assert info.num_parameters == 50 * 32 + 2 * 16 * 32
    assert info.weight_bytes == 4 * 50 * 32 + 2 * 2 * 16 * 32


def test_what_the_configuration_leaves_out_comes_from_the_weights(tmp_path, cache):
    folder = make_model(tmp_path / "m", num_key_value_heads=..., eos_token_id=...)
    save_file(tensors(k_rows=64), folder / "model.safetensors")
    info = inspect_model(folder, cache)
    assert (info.num_kv_heads, info.head_dim, info.eos_token_ids) == (4, 16, ())


def test_memory_adds_weights_cache_and_allowance(model, cache):
    info = inspect_model(model, cache)
    token_bytes = 2 * 2 * 2 * 8 * 4
    needed = memory_needed_bytes(info, 10, 16, overhead_bytes=1000)
    assert needed == 4 * info.num_parameters + 10 * 16 * token_bytes + 1000
    half = memory_needed_bytes(info, 10, 16, weight_itemsize=2, kv_itemsize=2, overhead_bytes=0)
    assert half == (needed - 1000) / 2


def test_the_fingerprint_is_of_contents_not_of_places(model, cache, tmp_path):
    info = inspect_model(model, cache)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert inspect_model(copy, cache).fingerprint == info.fingerprint
    write_config(copy, rope_theta=5)
    assert inspect_model(copy, cache).fingerprint != info.fingerprint
    write_config(copy)
    assert inspect_model(copy, cache).fingerprint == info.fingerprint
    changed = tensors()
    changed["model.embed_tokens.weight"][3, 3] = 2
    save_file(changed, copy / "model.safetensors")
    assert inspect_model(copy, cache).fingerprint != info.fingerprint
    assert inspect_model(copy, cache).tokenizer_digest == info.tokenizer_digest
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_model(copy, cache).tokenizer_digest != info.tokenizer_digest


def test_contents_are_read_once_and_again_when_they_change(model, cache):
    told: list[str] = []
    report = lambda stage, fraction: told.append(stage)  # noqa: E731
    first = inspect_model(model, cache, report)
    assert "digesting model.safetensors" in told
    told.clear()
    assert inspect_model(model, cache, report) == first
    assert told == []
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert inspect_model(model, cache, report) == first
    assert told == ["digesting model.safetensors"]


def test_a_damaged_digest_cache_is_made_anew(model, cache):
    first = inspect_model(model, cache)
    [kept] = (cache / "digests").iterdir()
    kept.write_text('{"model.safe')
    assert inspect_model(model, cache) == first
    assert json.loads(kept.read_text())


def test_digests_that_cannot_be_kept_cost_time_only(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    told: list[str] = []
    for _ in range(2):
        told.clear()
        inspect_model(model, tmp_path / "file", lambda stage, fraction: told.append(stage))
        assert "digesting model.safetensors" in told
        assert any("cannot be kept" in stage for stage in told)


def test_inspection_imports_neither_torch_nor_transformers(model, cache):
    code = (
        "import sys; from pathlib import Path; from engine.models import inspect_model;"
        "inspect_model(Path(sys.argv[1]), Path(sys.argv[2]));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, model, cache], check=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": ...}, "model_type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"model_type": "llava", "vision_config": {}, "text_config": {}}, "multimodal"),
        ({"model_type": "blt", "patcher_config": {"model_type": "x"}}, "several models"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "deepseek_v2"}, "MLA"),
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "rwkv"}, "state-space"),
        ({"model_type": "jamba"}, "state-space"),
        ({"model_type": "qwen3_next"}, "linear-attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "gemma3n_text"}, "shares K and V"),
        ({"num_kv_shared_layers": 5}, "shares K and V"),
        ({"num_key_value_heads": [1, 2]}, "different shapes"),
        ({"head_dim": 8, "v_head_dim": 4}, "different shapes"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, "auto_map"),
        ({"model_type": "no_such_thing"}, "no_such_thing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "ForSequenceClassification"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "its own attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"max_position_embeddings": 0}, "context of 0"),
        ({"max_position_embeddings": ...}, "does not say its context"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"head_dim": 16}, "do not belong together"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path, cache, changes, reason):
    assert reason in refused(make_model(tmp_path / "m", **changes), cache)


def test_a_known_architecture_runs_even_if_it_has_an_auto_map(tmp_path, cache):
    folder = make_model(tmp_path / "m", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    assert inspect_model(folder, cache).model_type == "llama"


def test_a_folder_must_be_there_and_be_a_model(tmp_path, cache):
    assert "no such folder" in refused(tmp_path / "nowhere", cache)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refused(empty, cache)
    (empty / "adapter_config.json").write_text("{}")
    assert "adapter" in refused(empty, cache)
    (empty / "model.gguf").write_text("GGUF")
    assert "GGUF" in refused(empty, cache)
    (empty / "config.json").write_text("{")
    assert "not valid JSON" in refused(empty, cache)
    (empty / "config.json").write_text("[]")
    assert "not a JSON object" in refused(empty, cache)


def test_weights_must_be_safetensors_and_whole(model, cache):
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "cut short" in refused(model, cache)
    weights.write_bytes(b"\xff" * 100)
    assert "not a safetensors file" in refused(model, cache)
    weights.write_bytes(b"")
    assert "not a safetensors file" in refused(model, cache)
    weights.unlink()
    assert "no weights" in refused(model, cache)
    (model / "pytorch_model.bin").write_bytes(b"")
    assert "pickled" in refused(model, cache)
    (model / "model-1.safetensors").write_bytes(whole)
    assert "lacks model.safetensors.index.json" in refused(model, cache)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors" in refused(model, cache)
    save_file({"b.weight": np.ones(3, np.float32)}, model / "model-2.safetensors")
    assert inspect_model(model, cache).num_parameters == 50 * 32 + 2 * 16 * 32 + 3


def test_quantised_tensors_and_missing_tokenizers_are_refused(model, cache):
    packed = {**tensors(), "model.layers.0.mlp.weight": np.ones((4, 4), np.int8)}
    save_file(packed, model / "model.safetensors")
    assert "I8" in refused(model, cache)
    masked = {**tensors(), "attn.bias": np.ones((4, 4), np.bool_)}
    save_file(masked, model / "model.safetensors")
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in refused(model, cache)
    (model / "tokenizer.json").write_text("{}")
    assert inspect_model(model, cache).num_parameters == 50 * 32 + 2 * 16 * 32


@pytest.mark.slow
def test_reasons_fit_transformers_own_configurations():
    from transformers import CONFIG_MAPPING

    def reason(model_type: str) -> str | None:
        config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        architecture = transformers_table("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type)
        return refusal_reason({**config, "architectures": [architecture]})

    for model_type in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2"):
        assert reason(model_type) is None, model_type
    for model_type in ("gemma3_text", "phi3", "olmo2", "gpt2", "gpt_neox", "smollm3", "gemma"):
        assert reason(model_type) is None, model_type
    expected = {
        "t5": "encoder-decoder",
        "whisper": "encoder-decoder",
        "gemma3": "multimodal",
        "llava": "multimodal",
        "deepseek_v3": "MLA",
        "falcon_mamba": "state-space",
        "qwen3_next": "linear_attention",
        "gemma3n_text": "shares K and V",
        "bloom": "its own attention",
    }
    assert {m: word in str(reason(m)) for m, word in expected.items()} == dict.fromkeys(
        expected, True
    )
