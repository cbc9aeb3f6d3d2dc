"""How many tokens, with which logprobs, in how many choices (B08, B09, B10, B11, B17)."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.local_cluster import EOS_ID, MODEL, TOKENIZER, Shape, running

PROMPT = list(range(20, 41))
A, B = (TOKENIZER.encode(c, add_special_tokens=False)[0] for c in "ab")


async def test_b08_the_first_token_counts_once_and_may_be_the_last(monkeypatch):
    """B08: it is made on P and must be neither lost nor made again on D."""
    async with running(monkeypatch) as cluster:
        ending = {"forced_token_ids": [EOS_ID]}
        for fields, num_tokens, finish in (
            ({"max_tokens": 1, "ignore_eos": True}, 1, "length"),
            ({"max_tokens": 2, "ignore_eos": True}, 2, "length"),
            ({**ending, "max_tokens": 9}, 1, "stop"),
            ({"forced_token_ids": [A], "stop_token_ids": [A], "max_tokens": 9}, 1, "stop"),
            ({**ending, "ignore_eos": True, "max_tokens": 9}, 9, "length"),
        ):
            for stream in (False, True):
                steps = {n: e.num_steps for n, e in cluster.engines.items()}
                reply = await cluster.check(PROMPT, stream=stream, **fields)
                assert reply.usage["completion_tokens"] == num_tokens
                assert reply.finish == finish
                await cluster.settle()
                decoded = sum(
                    e.num_steps - steps[n] for n, e in cluster.engines.items() if "decode" in n
                )
                assert decoded == 0 if num_tokens == 1 else decoded >= num_tokens - 1
        reply = await cluster.check(PROMPT, max_tokens=30, min_tokens=30)
        assert len(reply.token_ids) == 30


async def test_b09_usage_in_a_stream_is_what_was_asked_for(monkeypatch):
    """B09: the defaults of `stream_options`, over a real hand-off."""
    async with running(monkeypatch, Shape(hosts=1, prefill=1, decode=1)) as cluster:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True}
        for options, usages in (
            (None, {"absent"}),
            ({}, {"absent"}),
            ({"include_usage": False}, {"absent"}),
        ):
            reply = await cluster.post("/v1/completions", body | {"stream_options": options})
            assert set(reply.stream.usages) == usages
        reply = await cluster.complete(PROMPT, max_tokens=3, min_tokens=3, stream=True)
        *rest, last = reply.stream.usages
        assert set(rest) == {None} and reply.stream.done
        assert (last["prompt_tokens"], last["completion_tokens"]) == (len(PROMPT), 3)
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = await cluster.complete(PROMPT, max_tokens=3, stream=True, stream_options=options)
        assert all(usage["prompt_tokens"] == len(PROMPT) for usage in reply.stream.usages)
        refused = await cluster.complete(PROMPT, stream_options={"include_usage": True})
        assert (refused.status, refused.body["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(hosts=1, prefill=0, decode=0, coupled=1)], ids=["2p2d", "coupled"]
)
async def test_b10_echo_and_logprobs_after_a_full_cache_hit(monkeypatch, shape):
    """B10: a hit has no logits of the prompt; they are computed, not null and not a 500."""
    async with running(monkeypatch, shape) as cluster:
        text = "hello 世界, hello world!"
        fields = {"echo": True, "logprobs": 2}
        cold = await cluster.complete(text, max_tokens=0, **fields)
        await cluster.complete(text, max_tokens=4)
        await cluster.settle()
        assert (await cluster.complete(text, max_tokens=4)).cached_tokens > 0
        num_tokens = len(TOKENIZER.encode(text, add_special_tokens=False))
        for max_tokens in (0, 1, 4):
            more = {"max_tokens": max_tokens, "ignore_eos": True}
            warm = await cluster.complete(text, **fields, **more)
            made = warm.body["choices"][0]["logprobs"]
            if max_tokens == 0:
                assert warm.body["choices"] == cold.body["choices"]
                assert warm.text == text
            assert made["token_logprobs"][0] is None
            assert all(value <= 0 for value in made["token_logprobs"][1:])
            assert len(made["tokens"]) == num_tokens + max_tokens
            assert made["text_offset"] == sorted(made["text_offset"])
            assert warm.usage["completion_tokens"] == max_tokens
            streamed = await cluster.complete(text, stream=True, **fields, **more)
            pieces = [c["logprobs"] for chunk in streamed.stream.chunks for c in chunk["choices"]]
            joined = [v for piece in pieces if piece for v in piece["token_logprobs"]]
            assert joined == made["token_logprobs"]
            assert streamed.text == warm.text


async def test_b10_logprobs_of_half_characters_over_the_hand_off(monkeypatch):
    """B10: entries of tokens whose text is held back come later, none is lost."""
    async with running(monkeypatch) as cluster:
        forced = TOKENIZER.encode("👩é a", add_special_tokens=False)
        fields = {"forced_token_ids": forced, "max_tokens": len(forced), "logprobs": 1}
        whole = await cluster.complete("x", **fields)
        streamed = await cluster.complete("x", stream=True, **fields)
        entries = whole.body["choices"][0]["logprobs"]["token_logprobs"]
        pieces = [c["logprobs"] for chunk in streamed.stream.chunks for c in chunk["choices"]]
        assert [v for p in pieces if p for v in p["token_logprobs"]] == entries
        assert len(entries) == len(forced)


async def test_b11_lists_of_prompts_and_several_choices(monkeypatch):
    """B11: one transfer's metadata for several requests hangs or mixes them."""
    async with running(monkeypatch) as cluster:
        prompts = [PROMPT, PROMPT[:9], [*PROMPT, 1, 2, 3]]
        for n, seeded in ((1, {}), (3, {}), (2, {"temperature": 1.0, "seed": 7})):
            for stream in (False, True):
                fields = {"n": n, "max_tokens": 6, **seeded}
                reply = await cluster.complete(prompts, stream=stream, **fields)
                for index in range(len(prompts) * n):
                    expected = cluster.oracle(prompts[index // n], index % n, **fields)
                    assert reply.token_ids_of(index) == expected
                num_tokens = sum(len(cluster.oracle(p, i, **fields)) for p in prompts
                                 for i in range(n))  # fmt: skip
                assert reply.usage["prompt_tokens"] == sum(map(len, prompts))
                assert reply.usage["completion_tokens"] == num_tokens
                if not stream:
                    assert [c["index"] for c in reply.body["choices"]] == list(
                        range(len(prompts) * n)
                    )


async def test_b17_min_tokens_over_prefill_decode_and_a_migration(monkeypatch):
    """B17: counted from token 1 on P; a stop at token 2 does not end what must have 5."""
    async with running(monkeypatch) as cluster:
        forced = TOKENIZER.encode("a#bcd#ef", add_special_tokens=False)
        made = await cluster.complete(
            PROMPT, forced_token_ids=forced, stop="#", min_tokens=5, max_tokens=8
        )
        assert (made.text, made.finish) == ("a#bcd", "stop")
        assert made.usage["completion_tokens"] == 6
        stops = {"stop_token_ids": list(range(100)), "min_tokens": 12, "max_tokens": 40}
        assert len(cluster.oracle(PROMPT, **stops)) < 40
        await cluster.check(PROMPT, **stops)
        await cluster.check(PROMPT, min_tokens=8, max_tokens=8)
        for fields in ({"max_tokens": 4}, {"max_tokens": None, "min_tokens": 10**9}):
            refused = await cluster.complete(PROMPT, **{"min_tokens": 5} | fields)
            assert (refused.status, refused.body["error"]["param"]) == (400, "min_tokens")
        cluster.hold("decode", after=3)
        asking = asyncio.create_task(cluster.check(PROMPT, **stops))
        victim = await cluster.held("decode")
        await cluster.kill(victim)
        await asking
        await cluster.restart(victim)
        await cluster.until_registered()
