"""A streaming client that records tokens and their times, for checks and benchmarks.

It speaks to any OpenAI-compatible server that understands vLLM's `return_token_ids`.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from core.errors import HalfmoonError


@dataclass(slots=True)
class Completion:
    """What one streamed completion gave. Times are monotonic seconds, one for each token."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first token. Raises `HalfmoonError` if none."""
        if not self.token_times_s:
            raise HalfmoonError(f"no token came: {self.error}")
        return self.token_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        times = self.token_times_s
        return [b - a for a, b in itertools.pairwise(times)]


def session() -> aiohttp.ClientSession:
    """A client session without a total time limit: deadlines are the server's business here."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    """The name of the first model that the server lists. Raises `aiohttp.ClientError`."""
    async with http.get(f"{url}/v1/models", raise_for_status=True) as response:
        document = await response.json()
    return str(document["data"][0]["id"])


async def complete(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    on_token: Callable[[Completion], None] | None = None,
    **fields: object,
) -> Completion:
    """Stream a greedy completion of token ids. Never raises for what the server answers.

    `on_token(completion)` is called after each token. An HTTP error, an error event or a broken
    stream ends in `Completion.error`.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    result = Completion(time.monotonic())
    done = False
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:500]}"
                return result
            async for event in _events(response):
                if event == "[DONE]":
                    done = True
                    break
                _take(result, json.loads(event), on_token)
    except aiohttp.ClientError as error:
        result.error = f"{type(error).__name__}: {error}"
    if not done and result.error is None:
        result.error = "the stream ended without [DONE]"
    return result


def _take(
    result: Completion, chunk: dict[str, Any], on_token: Callable[[Completion], None] | None
) -> None:
    if "error" in chunk:
        result.error = json.dumps(chunk["error"])
        return
    if chunk.get("usage"):
        details = chunk["usage"].get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
    for choice in chunk["choices"]:
        now_s = time.monotonic()
        result.text += choice["text"]
        for token_id in choice.get("token_ids") or ():
            result.token_ids.append(token_id)
            result.token_times_s.append(now_s)
            if on_token is not None:
                on_token(result)
        result.finish_reason = choice["finish_reason"] or result.finish_reason


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data: "):
            yield line[6:]


TOKEN_RANGE = (1000, 40_000)


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    num_tokens: int,
) -> Completion:
    """Ask for exactly `num_tokens` tokens. Raises `HalfmoonError` for anything but an answer."""
    return checked(await complete(http, url, model, prompt, num_tokens, ignore_eos=True))


def checked(result: Completion) -> Completion:
    """Return a completion that has no error. Raises `HalfmoonError`."""
    if result.error is not None:
        raise HalfmoonError(result.error)
    return result


def random_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """Ordinary token ids of every usual vocabulary: no control tokens, cached by no accident."""
    return [chance.randrange(*TOKEN_RANGE) for _ in range(num_tokens)]
