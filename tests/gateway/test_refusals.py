"""What is refused, with which status, code and field (cases B09 to B23)."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import pytest_asyncio

from cluster.gateway.errors import ApiError
from cluster.gateway.fields import Fields, parse_json
from tests.gateway.client import CHAT, COMPLETIONS, answer, ask, body, text_of
from tests.gateway.cluster import TOKENIZER, config, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

V = TOKENIZER.vocab_size
LIMIT = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    """One cluster for all of this module: nothing here may disturb it."""
    async with running(tmp_path_factory.mktemp("refusals")) as made:
        yield made


@pytest.fixture
def cluster(shared):
    for worker in shared.workers:
        worker.requests.clear()
    return shared


async def refused(cluster, path: str, param: str | None, **fields) -> dict[str, Any]:
    """Ask, expect 400 that names `param`, and that a fresh request is served afterwards."""
    status, made = await ask(cluster, path, body(path, **fields))
    assert status == 400, made
    error: dict[str, Any] = made["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert cluster.workers[0].requests == []
    assert text_of(await answer(cluster, COMPLETIONS, "ok")) == "ok"
    return error


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None, 5, {}, [1.5], [None], [[1], "a"]])
async def test_b12_prompts_without_tokens(cluster, prompt):
    """B12: refused before anything is placed."""
    await refused(cluster, COMPLETIONS, "prompt", prompt=prompt)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "xyz", "content": "a"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "content": "the template refuses this"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ],
        *[
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": function}]},
            ]
            for function in (
                {"name": "\ud800", "arguments": "{}"},
                {"name": "f" * 1000, "arguments": "{}"},
                {"name": "f", "arguments": "NaN"},
                {"name": "f", "arguments": '{"a": [1e999]}'},
                {"name": "f", "arguments": '{"a": "\\ud800"}'},
                {"name": "f", "arguments": {"\udfff": 1}},
                {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000},
            )
        ],
    ],
)
async def test_b12_b14_messages_that_cannot_be_rendered(cluster, messages):
    """B12, B14: 400 with param `messages`, whoever refuses."""
    await refused(cluster, CHAT, "messages", messages=messages)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "tool", "content": "4", "tool_call_id": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "4"},
        ],
    ],
)
async def test_b14_legal_messages(cluster, messages):
    """B14: 200 when the template takes them."""
    assert text_of(await answer(cluster, CHAT, "ok", messages=messages)) == "ok"


async def test_b14_ten_thousand_messages(cluster):
    """B14: rendered off the loop, and refused for what they are: too long."""
    messages = [{"role": "user", "content": "a"}] * 10_000
    error = await refused(cluster, CHAT, "messages", messages=messages)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("stop_token_ids", [i]) for i in (-1, V, 2**31, 2**63, "abc", 1e3, True)],
        *[("logit_bias", {str(i): 1}) for i in (-1, V, 2**31, 2**63, "abc", "1e3", "٣", "05")],
        *[("logit_bias", {"1": b}) for b in (1e9, -101, 101, "1", None, True)],
        ("logit_bias", {str(i): 1 for i in range(50_000)}),
        ("logit_bias", [1]),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("bad_words", [1]),
        ("prompt", [1, V]),
        ("prompt", [[1], [-1]]),
        ("forced_token_ids", [V]),
    ],
)
async def test_b15_ids_out_of_the_vocabulary(cluster, name, value):
    """B15: and biases out of bounds."""
    await refused(cluster, COMPLETIONS, name, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", []),
        *[("temperature", v) for v in (-0.1, 2.1, "0.5", True)],
        *[("top_p", v) for v in (0, -1, 1.0001, "1")],
        *[("top_k", v) for v in (-2, 1.5, "5")],
        *[("min_p", v) for v in (-0.1, 1.1)],
        *[("presence_penalty", v) for v in (-2.1, 2.1)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1)],
        *[("repetition_penalty", v) for v in (0, -1, 11)],
        *[("seed", v) for v in (2**63, 1.0, "1")],
    ],
)
async def test_b16_numbers_out_of_bounds(cluster, name, value):
    """B16: 400 naming the field."""
    await refused(cluster, COMPLETIONS, name, **{name: value})


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
async def test_b16_numbers_that_are_not_finite(cluster, raw):
    """B16: NaN and Infinity are not JSON; 1e400 is no float."""
    text = json.dumps(body(COMPLETIONS, "a")).replace("}", f', "temperature": {raw}}}')
    headers = {"Content-Type": "application/json"}
    async with cluster.session.post(COMPLETIONS, data=text, headers=headers) as response:
        assert response.status == 400


@pytest.mark.parametrize("value", [1e-10, 1e-45, 0, -0.0])
async def test_b16_tiny_temperatures_are_greedy(cluster, value):
    """B16: no division by almost nothing."""
    await answer(cluster, COMPLETIONS, "a", temperature=value, top_p=1e-9, top_k=V + 1)
    params = cluster.workers[0].requests[0].params
    assert (params.temperature, params.top_k) == (0.0, V)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": 10**9},
        {"min_tokens": 10**9, "max_tokens": None},
        {"min_tokens": -1},
    ],
)
async def test_b17_min_tokens_that_cannot_be(cluster, fields):
    """B17: refused at once."""
    await refused(cluster, COMPLETIONS, "min_tokens", **fields)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(LIMIT, 1), (LIMIT + 1, ...), (10 * LIMIT, ...), (500, 13)]
)
async def test_b20_over_the_context(cluster, streaming, num_prompt, max_tokens):
    """B20: 400 before any event, with both numbers."""
    error = await refused(
        cluster, COMPLETIONS, "prompt", prompt=[1] * num_prompt, max_tokens=max_tokens,
        stream=streaming,
    )  # fmt: skip
    assert error["code"] == "context_length_exceeded"
    assert str(LIMIT) in error["message"]
    assert str(num_prompt) in error["message"]
    assert "-" not in error["message"]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(LIMIT - 1, ..., 1), (500, 12, 12), (500, ..., 12)]
)
async def test_b20_up_to_the_context(cluster, num_prompt, max_tokens, expected):
    """B20: without `max_tokens` it runs to the context's end."""
    made = await answer(cluster, COMPLETIONS, prompt=[1] * num_prompt, max_tokens=max_tokens)
    assert made["usage"]["completion_tokens"] == expected
    assert made["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("model", ["no-such", "", "tiny "])
async def test_b21_unknown_models(cluster, path, model):
    """B21: 404 with OpenAI's body."""
    status, made = await ask(cluster, path, body(path, "a", model=model))
    assert status == 404
    assert made["error"] == {
        "message": f"The model `{model}` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_b21_a_model_must_be_a_name(cluster):
    """B21: absent and null mean the one that is served; its name comes back."""
    await refused(cluster, COMPLETIONS, "model", model=5)
    for model in (None, ...):
        assert (await answer(cluster, COMPLETIONS, "a", model=model))["model"] == "tiny"


BOTH_WRONG = [
    ("max_tokens", "10"),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("stop", {}),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 257),
    ("temperature", []),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_object"}),
    ("response_format", "text"),
    ("logprobs", "yes"),
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("echo", 1),
    ("user", 5),
    ("cache_salt", 1),
    ("priority", 1 << 40),
    ("kv_transfer_params", {"x": 1}),
    ("chat_template", "{{ 1 }}"),
    ("use_beam_search", True),
]


@pytest.mark.parametrize(("name", "value"), BOTH_WRONG)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b23_wrong_values_are_named(cluster, path, name, value):
    """B23, B09: nothing is silently ignored."""
    await refused(cluster, path, name, **{name: value})


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "best_of", 5),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "logprobs", 21),
        (CHAT, "logprobs", 1),
        (CHAT, "top_logprobs", 1),
        (CHAT, "modalities", ["audio"]),
    ],
)
async def test_b23_values_that_one_endpoint_refuses(cluster, path, name, value):
    """B23: known, but not with this value."""
    await refused(cluster, path, name, **{name: value})


async def test_b23_stream_options_need_their_types(cluster):
    """B09, B23: inside objects too."""
    await refused(
        cluster, CHAT, "stream_options.include_usage", stream=True,
        stream_options={"include_usage": 1},
    )  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b23_null_and_defaults_are_accepted(cluster, path):
    """B23: SDKs send them on their own."""
    nulls = dict.fromkeys(name for name, _ in BOTH_WRONG if name not in ("max_tokens",))
    nulls |= dict.fromkeys(["suffix", "best_of", "top_logprobs", "modalities", "logit_bias"])
    assert text_of(await answer(cluster, path, "ok", **nulls)) == "ok"
    defaults = {
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "n": 1,
        "parallel_tool_calls": True, "store": False, "service_tier": "auto", "logit_bias": {},
        "presence_penalty": 0, "top_p": 1, "stop": [], "user": "me", "metadata": {"a": "b"},
        "use_beam_search": False, "length_penalty": 1, "top_k": -1,
    }  # fmt: skip
    if path == COMPLETIONS:
        defaults |= {"best_of": 1, "suffix": ""}
    assert text_of(await answer(cluster, path, "ok", **defaults)) == "ok"


async def test_forced_tokens_need_the_flag(tmp_path):
    async with running(tmp_path, config(enable_forced_tokens=False)) as cluster:
        status, made = await ask(cluster, COMPLETIONS, body(COMPLETIONS, "a"))
        assert (status, made["error"]["param"]) == (400, "forced_token_ids")


@pytest.mark.parametrize("ending", [b"", b"\\", b'"', b'"]'])
async def test_a_long_string_is_looked_at_once(ending):
    """At each quote anew, these few megabytes would take days."""
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json(b'{"prompt":"' + b'\\"' * 2_000_000 + ending, 64)


async def test_brackets_in_strings_are_no_nesting():
    deep = "[" * 100 + "\\" + '"' + "{" * 100
    assert parse_json(json.dumps({"prompt": deep}).encode(), 4) == {"prompt": deep}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_b20_a_text_that_can_never_fit_is_not_tokenised(cluster, monkeypatch, path):
    """B20: tokenising megabytes for nothing would keep everybody else waiting."""
    tokenizer = cluster.gateway._api._tokenizer
    encoded = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return [1]

    monkeypatch.setattr(tokenizer, "encode", encode)
    text = "a" * (LIMIT * tokenizer.max_token_bytes + 1)
    made: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        made = {"messages": [{"role": "user", "content": text}]}
    status, answered = await ask(cluster, path, made)
    assert status == 400
    assert answered["error"]["code"] == "context_length_exceeded"
    assert f"at least {LIMIT + 1} tokens" in answered["error"]["message"] or path == CHAT
    assert not encoded


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}),
        (COMPLETIONS, {"prompt": [1] * 100_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
        ("/detokenize", {"tokens": [1] * 100_000}),
    ],
)
async def test_large_bodies_are_validated_off_the_loop(cluster, monkeypatch, path, fields):
    """Else one client's long list would hold up every other client's tokens."""
    threads = set()
    get = Fields.get

    def noted(self: Fields, name: str) -> object:
        threads.add(threading.current_thread())
        return get(self, name)

    monkeypatch.setattr(Fields, "get", noted)
    status, _ = await ask(cluster, path, fields)
    assert status == 400
    assert threads
    assert threading.current_thread() not in threads
