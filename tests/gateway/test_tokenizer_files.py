"""A tokenizer kept from an earlier start equals what transformers makes of the folder."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from cluster.gateway import tokenizer_files
from cluster.gateway.tokenizer import FastTokenizer
from cluster.gateway.tokenizer_files import read_tokenizer
from core.errors import ConfigError
from tests.gateway.tiny_tokenizer import EOS, TEMPLATE, tiny_tokenizer

TEXT = "hello world, hé 世 <|end|><tool><|late|>"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path):
    """A model folder, as far as the tokenizer goes: some tokens only in its settings."""
    path = tmp_path / "model"
    path.mkdir()
    backend = tiny_tokenizer()._backend
    backend.enable_truncation(3)
    backend.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
        "pad_token": "<|late|>",
        "add_bos_token": True,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def no_transformers(monkeypatch):
    """Fail when the folder would be converted."""

    def refuse(folder):
        raise AssertionError(f"{folder} was converted again")

    return lambda: monkeypatch.setattr(tokenizer_files, "_convert", refuse)


def test_a_kept_tokenizer_equals_transformers_own(folder, cache, no_transformers):
    expected = AutoTokenizer.from_pretrained(folder)
    expected.backend_tokenizer.no_truncation()
    first = FastTokenizer.load(folder, cache)
    no_transformers()
    for tokenizer in (first, FastTokenizer.load(folder, cache)):
        assert tokenizer.vocab_size == len(expected)
        assert tokenizer.special_token_ids == set(expected.all_special_ids) | {
            expected.convert_tokens_to_ids("<|x|>")
        }
        for special in (True, False):
            ids = tokenizer.encode(TEXT, add_special_tokens=special)
            assert ids == expected.encode(TEXT, add_special_tokens=special)
            assert tokenizer.decode(ids, skip_special_tokens=special) == expected.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
        assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == (
            expected.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
        )


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_changed_file_is_read_anew(name, folder, cache, no_transformers):
    read_tokenizer(folder, cache)
    no_transformers()
    content = (folder / name).read_text() if (folder / name).exists() else "{}"
    (folder / name).write_text(content + " ")
    with pytest.raises(AssertionError, match="converted again"):
        read_tokenizer(folder, cache)


def test_the_folder_may_move(folder, cache, no_transformers):
    read_tokenizer(folder, cache)
    no_transformers()
    assert read_tokenizer(folder.rename(folder.with_name("moved")), cache)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"backend": "{}"}'])
def test_a_spoilt_file_is_made_anew(content, folder, cache):
    facts = read_tokenizer(folder, cache)
    (kept,) = cache.iterdir()
    kept.write_text(content)
    assert read_tokenizer(folder, cache) == facts
    assert json.loads(kept.read_text())["backend"] == facts.backend


def test_a_cache_that_cannot_be_written_costs_only_time(folder, cache):
    cache.write_text("in the way")
    assert read_tokenizer(folder, cache).special_tokens["eos_token"] == EOS


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, cache):
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        FastTokenizer.load(tmp_path, cache)
