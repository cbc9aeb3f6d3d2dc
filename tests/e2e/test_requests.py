"""What clients send by mistake hurts nobody (B12, B14, B15, B16, B20, B21), with `openai`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.harness.local_cluster import CHAT, MODEL, TOKENIZER, Shape, running

SMALL = Shape(hosts=1, prefill=1, decode=1)


async def test_b12_b14_b15_b16_mistakes_leave_the_neighbour_alone(monkeypatch):
    """B12, B14, B15, B16: validation after enqueueing kills the engine or corrupts other rows."""
    async with running(monkeypatch, SMALL) as cluster:
        prompt = list(range(40))
        cluster.hold("decode", after=2)
        neighbour = asyncio.create_task(cluster.check(prompt, max_tokens=60, ignore_eos=True))
        await cluster.held("decode")
        size = TOKENIZER.vocab_size
        no_prompts: list[Any] = ["", [], [[]], [""], [size], [-1], [[1], [2**31]]]
        hello = [{"role": "user", "content": "hi"}]
        bad: list[dict[str, Any]] = [
            *({"prompt": p} for p in no_prompts),
            *({"prompt": "a", "stop_token_ids": [i]} for i in (-1, size, 2**63, "abc", 1.5)),
            *({"prompt": "a", "logit_bias": b} for b in ({str(size): 1}, {"1": 101}, {"x": 1})),
            {"prompt": "a", "bad_words": [""]},
            *({"prompt": "a", "temperature": t} for t in (2.1, -1, "0.5")),
            *({"prompt": "a", "top_p": p} for p in (0, 1.0001)),
            {"prompt": "a", "top_k": size * 1.5},
            *({"messages": m} for m in ([], [{"role": "tool"}], [{"role": "xyz", "content": ""}])),
            {"messages": [{"role": "assistant", "content": "hi"}, *hello]},
        ]
        for fields in bad:
            path = CHAT if "messages" in fields else "/v1/completions"
            reply = await cluster.post(path, {"model": MODEL, "max_tokens": 2, **fields})
            assert reply.status == 400, fields
            assert reply.body["error"]["type"] == "invalid_request_error"
            assert reply.body["error"]["param"] in fields
        for engine in cluster.engines.values():
            engine.release()
        tiny = [cluster.check(prompt[i:], temperature=t) for i, t in ((1, 1e-10), (2, -0.0))]
        await asyncio.gather(neighbour, *tiny)


async def test_b20_the_context_is_exactly_as_long_as_it_says(monkeypatch):
    """B20: late validation gives a 200 with an error inside, or kills the prefill worker."""
    async with running(monkeypatch, SMALL) as cluster:
        limit = cluster.spec.max_model_len
        last = await cluster.check([3] * (limit - 1), max_tokens=None, ignore_eos=True)
        assert (last.usage["completion_tokens"], last.finish) == (1, "length")
        prompt = [4] * (limit - 50)
        for fields in ({"max_tokens": 50}, {"max_tokens": None}):
            for stream in (False, True):
                reply = await cluster.check(prompt, ignore_eos=True, stream=stream, **fields)
                assert (len(reply.token_ids), reply.finish) == (50, "length")
        for num_tokens, max_tokens in ((limit, None), (limit + 1, 1), (10 * limit, 1), (200, 57)):
            for stream in (False, True):
                reply = await cluster.complete(
                    [5] * num_tokens, max_tokens=max_tokens, stream=stream
                )
                error = reply.body["error"]
                assert (reply.status, error["code"]) == (400, "context_length_exceeded")
                assert str(limit) in error["message"] and str(num_tokens) in error["message"]
                assert "-" not in error["message"]


async def test_b21_the_official_client_understands_every_answer(monkeypatch):
    """B21: error bodies of another shape become the wrong exception, or none."""
    async with (
        running(monkeypatch) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "hello there"}]
        rendered = await cluster.post("/tokenize", {"model": MODEL, "messages": messages})
        token_ids = rendered.body["tokens"]
        expected = cluster.oracle(token_ids, max_tokens=7)
        text = TOKENIZER.decode(expected, skip_special_tokens=True)
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": 7,
            "temperature": 0,
        }
        whole = await client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == text
        assert whole.usage.prompt_tokens == len(token_ids)
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(deltas) == text
        assert chunks[-1].usage.completion_tokens == len(expected)
        made = await client.completions.create(
            model=MODEL, prompt=token_ids, max_tokens=7, temperature=0
        )
        assert (made.choices[0].text, made.model) == (text, MODEL)
        for model in ("no-such", ""):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model=model, prompt="x")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            assert f"`{model}`" in missing.value.message
        mistakes: list[dict[str, Any]] = [{"model": 5}, {"max_tokens": "10"}]
        for fields in mistakes:
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.completions.create(**{"model": MODEL, "prompt": "x", **fields})
            assert wrong.value.param in fields
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model=MODEL, input="x")
