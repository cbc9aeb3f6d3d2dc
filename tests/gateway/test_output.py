"""What comes out: text, stop strings, usage, logprobs, choices (cases B01 to B11, B17)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.client import CHAT, COMPLETIONS, answer, stream, text_of
from tests.gateway.cluster import EOS_ID, FILLER, TOKENIZER, ids
from tests.gateway.tiny_tokenizer import EOS

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@BOTH
@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 世界 é 🇯🇵", "A 世世ab", " a\u0301", f"a{EOS[:3]}<|x|>b", "hello world"]
)
async def test_b01_b02_deltas_equal_the_whole_text(cluster, path, text):
    """B01, B02: the first byte of a character comes from prefill, the rest from decode."""
    streamed = await stream(cluster, path, text)
    whole = await answer(cluster, path, text)
    assert (
        streamed.text() == text_of(whole) == TOKENIZER.decode(ids(text), skip_special_tokens=True)
    )
    assert all("\ufffd" not in delta for delta in streamed.deltas())
    assert streamed.finishes() == ["length"]
    assert streamed.done


@BOTH
async def test_b02_special_tokens_show_when_asked(cluster, path):
    """B02: `skip_special_tokens` false."""
    streamed = await stream(cluster, path, "a<|x|>b", skip_special_tokens=False)
    assert streamed.text() == "a<|x|>b"


@BOTH
@pytest.mark.parametrize(
    ("output", "stop", "text", "finish"),
    [
        ("hi\n\nUser:x", ["\n\nUser:"], "hi", "stop"),
        ("hi\n\nUsex", ["\n\nUser:"], "hi\n\nUsex", "length"),
        ("ok 世界!", "界", "ok 世", "stop"),
        ("go👩!", ["👩", "zzz"], "go", "stop"),
        ("x" + "ab" * 120 + "y", "ab" * 120, "x", "stop"),
    ],
)
async def test_b04_nothing_of_a_stop_string_leaks(cluster, path, output, stop, text, finish):
    """B04: held back until it is certain; a near miss comes in full."""
    streamed = await stream(cluster, path, output, stop=stop)
    whole = await answer(cluster, path, output, stop=stop)
    assert (streamed.text(), streamed.finishes()) == (text, [finish])
    assert (text_of(whole), whole["choices"][0]["finish_reason"]) == (text, finish)


@BOTH
async def test_b04_the_stop_string_is_included_once_when_asked(cluster, path):
    """B04: `include_stop_str_in_output`."""
    streamed = await stream(
        cluster, path, "hi\n\nUser: x", stop="\n\nUser:", include_stop_str_in_output=True
    )
    assert streamed.text() == "hi\n\nUser:"


async def test_b05_a_stop_string_across_the_hand_off_is_not_billed_further(cluster):
    """B05: its first character is sampled on P, its second on D; D is told to stop."""
    made = await answer(cluster, COMPLETIONS, "##" + "x" * 50, stop="##")
    assert (text_of(made), made["usage"]["completion_tokens"]) == ("", 2)
    decode = cluster.workers[1]
    await cluster.settle()
    async with asyncio.timeout(5):
        await decode.was_cancelled.wait()
    assert decode.cancelled == [decode.requests[0].attempt]


async def test_b05_a_stop_string_that_is_the_first_token(cluster):
    """B05: complete with the token from P."""
    made = await answer(cluster, COMPLETIONS, "#xyz", stop="#")
    assert (text_of(made), made["usage"]["completion_tokens"]) == ("", 1)


async def test_b05_a_stop_string_does_not_match_the_prompt(cluster):
    """B05: the prompt ends with its first half."""
    made = await answer(cluster, COMPLETIONS, "b!", prompt="aa", stop="ab")
    assert text_of(made) == "b!"


async def test_b07_cached_tokens_are_what_prefill_skipped(cluster):
    """B07: not what decode loaded."""
    cluster.workers[0].script.cached_tokens = 4
    made = await answer(cluster, COMPLETIONS, "abc")
    assert made["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize(
    ("fields", "num_tokens", "finish"),
    [
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 2}, 2, "length"),
        ({"forced_token_ids": [EOS_ID], "max_tokens": 9}, 1, "stop"),
        ({"forced_token_ids": [FILLER], "stop_token_ids": [FILLER], "max_tokens": 9}, 1, "stop"),
        ({"forced_token_ids": [EOS_ID], "ignore_eos": True, "max_tokens": 9}, 9, "length"),
    ],
)
async def test_b08_the_first_token_counts_once(cluster, fields, num_tokens, finish):
    """B08: over prefill and decode; what ends at token 1 never reaches decode."""
    made = await answer(cluster, COMPLETIONS, **fields)
    assert made["usage"]["completion_tokens"] == num_tokens
    assert made["choices"][0]["finish_reason"] == finish
    if fields["max_tokens"] == 1:
        assert cluster.workers[0].requests[0].decode is None
        assert cluster.workers[1].requests == []


@BOTH
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (..., "absent"),
        (None, "absent"),
        ({}, "absent"),
        ({"include_usage": False}, "absent"),
        ({"continuous_usage_stats": True}, "absent"),
    ],
)
async def test_b09_no_usage_unless_asked(cluster, path, options, expected):
    """B09: the defaults of `stream_options`."""
    streamed = await stream(cluster, path, "abc", stream_options=options)
    assert set(streamed.usages) == {expected}
    assert all(len(c["choices"]) == 1 for c in streamed.chunks)


@BOTH
async def test_b09_usage_comes_once_at_the_end(cluster, path):
    """B09: null before, and a last chunk without choices."""
    streamed = await stream(cluster, path, "abc", stream_options={"include_usage": True})
    *before, last = streamed.chunks
    assert [c["usage"] for c in before] == [None] * len(before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert streamed.done


@BOTH
async def test_b09_continuous_usage_is_on_every_chunk(cluster, path):
    """B09: `continuous_usage_stats`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = await stream(cluster, path, "abc", stream_options=options)
    counts = [u["completion_tokens"] for u in streamed.usages]
    assert counts == sorted(counts)
    assert counts[-1] == 3


async def test_b10_echo_without_output(cluster):
    """B10: `echo` with `max_tokens` 0 and logprobs; the prompt is computed in full."""
    made = await answer(cluster, COMPLETIONS, prompt="hello w", echo=True, logprobs=2, max_tokens=0)
    choice = made["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hello w"
    assert logprobs["tokens"] == ["hello", " w"]
    assert logprobs["text_offset"] == [0, 5]
    assert logprobs["token_logprobs"] == [None, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 3
    assert made["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    assert cluster.workers[0].requests[0].num_reusable_blocks == 0


@pytest.mark.parametrize("output", ["世x", "ab"])
async def test_b10_every_token_has_its_logprobs(cluster, output):
    """B10: entries of held-back tokens come with the text; offsets do not fall."""
    streamed = await stream(cluster, COMPLETIONS, output, logprobs=1, echo=True)
    entries: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": []}
    for chunk in streamed.chunks:
        choice = chunk["choices"][0]
        if choice["logprobs"] is not None:
            assert choice["text"]
            for name, values in entries.items():
                values += choice["logprobs"][name]
    whole = (await answer(cluster, COMPLETIONS, output, logprobs=1, echo=True))["choices"][0]
    assert streamed.text() == whole["text"] == "say it" + output
    assert entries == {name: whole["logprobs"][name] for name in entries}
    assert len(entries["tokens"]) == 6 + len(ids(output))
    assert entries["text_offset"] == sorted(entries["text_offset"])
    assert whole["text"][entries["text_offset"][-1] :] == output[-1]


async def test_b10_chat_logprobs_spell_out_bytes(cluster):
    """B10: half characters as bytes."""
    made = await answer(cluster, CHAT, "世", logprobs=True, top_logprobs=2)
    content = made["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "世"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    none = await answer(cluster, CHAT, "世")
    assert none["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("streaming", [False, True])
async def test_b11_every_prompt_has_its_choices(cluster, streaming):
    """B11: a list of prompts and `n`; prompts are counted once."""
    fields: dict[str, Any] = {
        "prompt": ["a", "bb", ids("ccc")][:2],
        "n": 2,
        "echo": True,
        "max_tokens": 2,
    }
    if streaming:
        streamed = await stream(
            cluster, COMPLETIONS, **fields, stream_options={"include_usage": True}
        )
        texts = [streamed.text(i) for i in range(4)]
        assert [streamed.finishes(i) for i in range(4)] == [["length"]] * 4
        usage = streamed.usages[-1]
    else:
        made = await answer(cluster, COMPLETIONS, **fields)
        assert [c["index"] for c in made["choices"]] == [0, 1, 2, 3]
        texts = [c["text"] for c in made["choices"]]
        usage = made["usage"]
    assert texts == ["azz", "azz", "bbzz", "bbzz"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)


async def test_b11_prompts_as_lists_of_ids(cluster):
    """B11: token ids."""
    prompts = [ids("ab"), ids("hello")]
    made = await answer(cluster, COMPLETIONS, prompt=prompts, echo=True, max_tokens=1)
    assert [c["text"] for c in made["choices"]] == ["abz", "helloz"]


async def test_b11_b18_choices_have_seeds_of_their_own(cluster):
    """B11, B18: choice 0 is the request alone; the others are derived, the same every time."""

    async def seeds(**fields) -> list[int]:
        cluster.workers[0].requests.clear()
        await answer(cluster, COMPLETIONS, max_tokens=1, **fields)
        return [r.params.seed for r in cluster.workers[0].requests]

    three = await seeds(n=3, seed=7)
    assert len(set(three)) == 3
    assert await seeds(n=3, seed=7) == three
    assert await seeds(seed=7) == three[:1] == [7]
    assert await seeds() != await seeds()


async def test_b17_min_tokens_is_kept(cluster):
    """B17: a stop string at token 2 does not end what must have 5."""
    made = await answer(cluster, COMPLETIONS, "a#bcdefg", stop="#", min_tokens=5)
    assert text_of(made) == "a#bcdefg"
    made = await answer(cluster, COMPLETIONS, "abcde", stop="#", min_tokens=5)
    assert made["usage"]["completion_tokens"] == 5


async def test_token_ids_come_back_when_asked(cluster):
    made = await answer(cluster, COMPLETIONS, "世x", return_token_ids=True, echo=True)
    assert made["choices"][0]["token_ids"] == ids("世x")
    assert made["choices"][0]["prompt_token_ids"] == ids("say it")
    streamed = await stream(cluster, CHAT, "世x", return_token_ids=True)
    streamed_ids = [i for c in streamed.chunks for i in c["choices"][0].get("token_ids", [])]
    assert streamed_ids == ids("世x")


async def test_sampling_fields_reach_the_workers(cluster):
    await answer(
        cluster, COMPLETIONS, max_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"3": -100},
        bad_words=["he"], stop_token_ids=[5], seed=-1, priority=3, min_tokens=1,
    )  # fmt: skip
    request = cluster.workers[0].requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == ((3, -100.0),)
    assert params.bad_words == tuple(sorted([tuple(ids("he")), tuple(ids(" he"))]))
    assert params.stop_token_ids == (5, EOS_ID)
    assert params.seed == (1 << 64) - 1
    assert (request.priority, params.min_tokens) == (3, 1)
    assert request == cluster.workers[0].requests[0]
    assert cluster.workers[1].requests[0].params == params


async def test_metrics_tell_what_happened(cluster):
    cluster.workers[0].script.cached_tokens = 4
    await answer(cluster, COMPLETIONS, "abc", no_such_field=1)
    async with cluster.session.get("/metrics") as response:
        text = await response.text()
    at = '{model_name="tiny",role="prefill"'
    assert f"vllm:prompt_tokens_total{at}}} 6.0" in text
    assert f'vllm:prompt_tokens_by_source_total{at},source="external_kv_transfer"}} 4.0' in text
    assert f'vllm:prompt_tokens_by_source_total{at},source="local_compute"}} 2.0' in text
    assert f"vllm:time_to_first_token_seconds_count{at}}} 1.0" in text
    decode = '{model_name="tiny",role="decode"'
    success = 'vllm:request_success_total{finished_reason="length",model_name="tiny",role="decode"}'
    assert f"{success} 1.0" in text
    assert 'halfmoon_unknown_fields_total{model_name="tiny",role="gateway"} 1.0' in text
    assert f"vllm:generation_tokens_total{decode}}} 2.0" in text
