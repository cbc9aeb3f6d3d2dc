"""From the JSON of a request to a typed call. Everything wrong is found here, before any work."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.gateway.errors import invalid, model_not_found, unsupported
from cluster.gateway.fields import Fields, check_integer, check_number, check_text
from core.config import GatewayConfig

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20
MAX_MESSAGES = 100_000
MAX_NAME_CHARS = 512
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: their logits would leave the range of float32."""

_ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share. `None` means that the client left it to us."""

    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[str, ...]
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    skip_special_tokens: bool
    return_token_ids: bool
    priority: int
    cache_salt: str
    forced_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A call of `/v1/completions`. A prompt is text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call of `/v1/chat/completions`."""

    options: Options
    messages: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool
    unknown: tuple[str, ...]


def read_completion(
    body: Mapping[str, object], config: GatewayConfig, vocab_size: int
) -> CompletionCall:
    """Read a body of `/v1/completions`. Raises `ApiError`."""
    fields = Fields(body)
    check_model(fields, config.model_name)
    prompts = _prompts(fields, config, vocab_size)
    echo = fields.boolean("echo", False)
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, _UNLIMITED)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    options = _options(fields, config, vocab_size, max_tokens, logprobs)
    fields.refuse_unless("suffix", "")
    fields.refuse_unless("best_of", 1, options.n)
    _refuse_others(fields)
    if len(prompts) * options.n > max(config.max_choices, config.max_prompts):
        raise invalid("n", "`n` times the number of prompts is too large.")
    return CompletionCall(options, prompts, echo, tuple(fields.unknown()))


def read_chat(body: Mapping[str, object], config: GatewayConfig, vocab_size: int) -> ChatCall:
    """Read a body of `/v1/chat/completions`. Raises `ApiError`."""
    fields = Fields(body)
    check_model(fields, config.model_name)
    messages = read_messages(fields)
    max_tokens = fields.integer("max_tokens", 1, _UNLIMITED)
    newer = fields.integer("max_completion_tokens", 1, _UNLIMITED)
    wants_logprobs = fields.boolean("logprobs", False)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    options = _options(fields, config, vocab_size, max_tokens if newer is None else newer, logprobs)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    fields.refuse_unless("echo", False)
    _refuse_others(fields)
    return ChatCall(options, messages, add_generation_prompt, tuple(fields.unknown()))


def check_model(fields: Fields, served: str) -> None:
    """Refuse any model but the one served; absent and null mean that one."""
    name = fields.text("model", MAX_NAME_CHARS)
    if name is not None and name != served:
        raise model_not_found(name)


def _options(
    fields: Fields,
    config: GatewayConfig,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> Options:
    stream = fields.boolean("stream", False)
    include_usage, continuous_usage = _stream_options(fields, stream)
    min_tokens = fields.integer("min_tokens", 0, _UNLIMITED) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"`min_tokens` must be at most max_tokens ({max_tokens}).")
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    return Options(
        n=fields.integer("n", 1, config.max_choices) or 1,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(fields.integer("top_k", -1, _UNLIMITED) or 0, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 10.0, above=True),
        logit_bias=_logit_bias(fields, vocab_size),
        bad_words=_strings(fields, "bad_words", MAX_BAD_WORDS),
        stops=_stops(fields),
        stop_token_ids=_token_ids(fields, "stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        ignore_eos=fields.boolean("ignore_eos", False),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        logprobs=logprobs,
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids", False),
        priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        cache_salt=fields.text("cache_salt", MAX_NAME_CHARS) or "",
        forced_token_ids=_forced(fields, config, vocab_size),
    )


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    raw = fields.mapping("stream_options", 16)
    if raw is None:
        return False, False
    if not stream:
        raise invalid("stream_options", "`stream_options` needs `stream` to be true.")
    options = Fields(raw, "stream_options.")
    include = options.boolean("include_usage", False)
    continuous = options.boolean("continuous_usage_stats", False)
    return include, include and continuous


def _stops(fields: Fields) -> tuple[str, ...]:
    if isinstance(fields.get("stop"), str):
        stop = fields.text("stop", MAX_STOP_CHARS)
        if not stop:
            raise invalid("stop", "`stop` must not be empty.")
        return (stop,)
    return _strings(fields, "stop", MAX_STOPS)


def _strings(fields: Fields, name: str, max_items: int) -> tuple[str, ...]:
    items = fields.items(name, max_items)
    texts = tuple(check_text(name, item, MAX_STOP_CHARS) for item in items)
    if "" in texts:
        raise invalid(name, f"`{name}` must not hold an empty string.")
    return texts


def _token_ids(fields: Fields, name: str, max_items: int, vocab_size: int) -> tuple[int, ...]:
    items = fields.items(name, max_items)
    return tuple(check_integer(name, item, 0, vocab_size - 1) for item in items)


def _forced(fields: Fields, config: GatewayConfig, vocab_size: int) -> tuple[int, ...]:
    if not config.enable_forced_tokens:
        fields.refuse_unless("forced_token_ids", [])
        return ()
    return _token_ids(fields, "forced_token_ids", config.max_model_len, vocab_size)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    raw = fields.mapping("logit_bias", MAX_LOGIT_BIAS) or {}
    biases = []
    for key, value in raw.items():
        # Without leading zeros, so that no token is named twice.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise invalid("logit_bias", "The keys of `logit_bias` must be token ids.")
        token_id = check_integer("logit_bias", int(key), 0, vocab_size - 1)
        biases.append((token_id, check_number("logit_bias", value, -100.0, 100.0)))
    return tuple(sorted(biases))


def _prompts(
    fields: Fields, config: GatewayConfig, vocab_size: int
) -> tuple[str | tuple[int, ...], ...]:
    raw = fields.get("prompt")
    if isinstance(raw, str):
        return (check_text("prompt", raw, config.max_body_bytes),)
    if not isinstance(raw, list) or not raw:
        raise invalid("prompt", "`prompt` must be text, token ids, or a non-empty array of these.")
    if isinstance(raw[0], int | float | None):
        return (_prompt_ids(raw, vocab_size),)
    if len(raw) > config.max_prompts:
        raise invalid("prompt", f"`prompt` may have at most {config.max_prompts} entries.")
    if isinstance(raw[0], str):
        return tuple(check_text("prompt", item, config.max_body_bytes) for item in raw)
    return tuple(_prompt_ids(item, vocab_size) for item in raw)


def _prompt_ids(raw: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise invalid("prompt", "`prompt` must be text, token ids, or a non-empty array of these.")
    return tuple(check_integer("prompt", item, 0, vocab_size - 1) for item in raw)


# --- chat ---------------------------------------------------------------------------------------


def read_messages(fields: Fields) -> tuple[Mapping[str, object], ...]:
    """Read `messages` as templates expect them: contents as one text, arguments as objects."""
    items = fields.items("messages", MAX_MESSAGES)
    if not items:
        raise invalid("messages", "`messages` must be a non-empty array.")
    return tuple(_message(item) for item in items)


def _message(item: object) -> Mapping[str, object]:
    if not isinstance(item, dict):
        raise invalid("messages", "Each of `messages` must be an object.")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid("messages", f"`role` must be one of {', '.join(sorted(_ROLES))}.")
    message: dict[str, object] = {"role": role}
    calls = item.get("tool_calls")
    content = item.get("content")
    if content is not None:
        message["content"] = _content(content)
    elif role == "assistant" and calls:
        message["content"] = ""
    else:
        raise invalid("messages", f"A message of role {role} needs `content`.")
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls)
    for name in ("name", "tool_call_id"):
        if item.get(name) is not None:
            message[name] = check_text("messages", item[name], MAX_NAME_CHARS)
    return message


def _content(content: object) -> str:
    if isinstance(content, str):
        return check_text("messages", content, len(content))
    if not isinstance(content, list):
        raise invalid("messages", "`content` must be text or an array of text parts.")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise invalid("messages", "Only text parts are supported in `content`.")
        if part.get("type") not in ("text", "input_text"):
            raise invalid("messages", "Only text parts are supported in `content`.")
        texts.append(check_text("messages", part["text"], len(part["text"])))
    return "\n".join(texts)


def _tool_calls(calls: object) -> list[object]:
    if not isinstance(calls, list):
        raise invalid("messages", "`tool_calls` must be an array.")
    read: list[object] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("messages", "Each of `tool_calls` needs a `function` with a `name`.")
        check_text("messages", function["name"], MAX_NAME_CHARS)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise invalid(
                    "messages", "The `arguments` of a tool call are not valid JSON."
                ) from None
        read.append({**call, "function": {**function, "arguments": arguments}})
    try:
        # What a template may print: no NaN, no Infinity, no half of a surrogate pair, at any depth.
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise invalid("messages", "`tool_calls` holds what is not valid JSON.") from None
    return read


# --- known, but not supported yet ---------------------------------------------------------------


def _refuse_others(fields: Fields) -> None:
    """Refuse what is known and not served, by name; accept its default, which SDKs send."""
    response_format = fields.mapping("response_format", 16)
    if response_format is not None and response_format.get("type") != "text":
        raise unsupported("response_format")
    has_tools = bool(fields.items("tools", 1024))
    if has_tools or fields.items("functions", 1024):
        raise unsupported("tools" if has_tools else "functions")
    fields.refuse_unless("tool_choice", "none", "auto")
    fields.refuse_unless("function_call", "none", "auto")
    fields.boolean("parallel_tool_calls", True)
    fields.refuse_unless("modalities", ["text"])
    fields.refuse_unless("service_tier", "auto", "default")
    fields.refuse_unless("store", False)
    fields.refuse_unless("use_beam_search", False)
    fields.refuse_unless("length_penalty", 1.0)
    fields.refuse_unless("early_stopping", False)
    fields.refuse_unless("continue_final_message", False)
    fields.refuse_unless("spaces_between_special_tokens", True)
    fields.refuse_unless("allowed_token_ids", [])
    for name in (
        "audio", "prediction", "reasoning_effort", "web_search_options", "prompt_logprobs",
        "truncate_prompt_tokens", "chat_template", "chat_template_kwargs", "documents",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
        "add_special_tokens", "logits_processors", "kv_transfer_params", "verbosity",
    ):  # fmt: skip
        fields.refuse_unless(name)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name, MAX_NAME_CHARS)
    fields.get("metadata")
