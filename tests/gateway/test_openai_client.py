"""The official `openai` client, as people use it."""

from __future__ import annotations

import openai
import pytest

from tests.gateway.cluster import MODEL, config, ids, running


@pytest.fixture
async def client(cluster):
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def forced(text: str) -> dict[str, object]:
    return {"forced_token_ids": ids(text)}


async def test_models(client):
    assert [m.id async for m in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_chat(client):
    made = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=len(ids("hello 世")),
        logprobs=True,
        top_logprobs=1,
        extra_body=forced("hello 世"),
    )
    assert made.choices[0].message.content == "hello 世"
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == len(ids("hello 世"))
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    assert len(made.choices[0].logprobs.content) == len(ids("hello 世"))


async def test_streamed_chat(client):
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=forced("abc"),
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 3


async def test_completions(client):
    made = await client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=2, echo=True, logprobs=1, extra_body=forced("xy")
    )
    assert [c.text for c in made.choices] == ["axy", "bxy"]
    assert made.choices[0].logprobs.tokens == ["a", "x", "y"]
    stream = await client.completions.create(
        model=MODEL, prompt="a", max_tokens=2, stream=True, extra_body=forced("xy")
    )
    assert "".join([c.choices[0].text async for c in stream]) == "xy"


async def test_b21_exception_classes(client, tmp_path):
    """B21: the SDK tells errors apart by status, and reads code and param from the body."""
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no-such", messages=messages)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[1] * 600)
    assert long.value.code == "context_length_exceeded"
    async with running(tmp_path / "other", config(api_keys=("k",))) as guarded:
        wrong = openai.AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key="x", max_retries=0)
        async with wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()


async def test_an_error_in_a_stream_is_raised(tmp_path):
    async with running(tmp_path, config(retry_window_s=0.1)) as cluster:
        dying = cluster.workers[1]
        dying.script.pause_at = 2
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model=MODEL, prompt="a", max_tokens=5, stream=True
            )
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    if dying in cluster.workers:
                        cluster.workers.remove(dying)
                        await dying.kill()
