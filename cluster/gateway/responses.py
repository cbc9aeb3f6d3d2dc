"""Bodies and stream chunks of OpenAI's API, from the outputs of choices."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.request_events import StreamToken
from core.requests import FinishReason, PositionLogprobs, TokenLogprob

_LEAST_LOGPROB = -9999.0  # JSON has no -Infinity

Json = dict[str, object]


def dump(body: Json) -> bytes:
    """Encode a body. Raises `ValueError` for NaN."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def sse(body: Json) -> bytes:
    """Encode a body as one server-sent event."""
    return b"data: " + dump(body) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token as logprobs list it. `offset` is where its text starts; `logprobs` may lack."""

    token_id: int
    offset: int
    logprobs: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk tells of a choice. `finish` is set on its last one.

    `prompt` are the entries of an echoed prompt, in its first one.
    """

    text: str
    entries: tuple[TokenEntry, ...]
    finish: FinishReason | None = None
    prompt: tuple[TokenEntry, ...] = ()


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Make one of all pieces of a choice."""
    return Piece(
        "".join(p.text for p in pieces),
        tuple(e for p in pieces for e in p.entries),
        pieces[-1].finish,
        tuple(e for p in pieces for e in p.prompt),
    )


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as `echo` shows it."""

    text: str
    token_ids: tuple[int, ...]


class ChoiceOutput:
    """Collects a choice's tokens until there is text to show them with.

    So no chunk has logprobs without text but the last, and no entry is lost. `echo` is the prompt
    that is shown before the output; `discard` drops the output (an echo that asked for none).
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], echo: EchoedPrompt | None, *, discard: bool
    ) -> None:
        self.num_tokens = 0
        self._token_bytes = token_bytes
        self._echo = echo
        self._discard = discard
        self._offsets = TextOffsets(token_bytes, len(echo.text) if echo else 0)
        self._entries: list[TokenEntry] = []
        self._prompt: tuple[TokenEntry, ...] = ()

    def take(self, output: StreamToken) -> Piece | None:
        """Take a token; return a piece if there is text to show."""
        token = output.token
        if token.seq == 0 and self._echo is not None:
            self._prompt = prompt_entries(
                self._token_bytes, self._echo.token_ids, token.prompt_logprobs
            )
        if self._discard:
            return None
        self.num_tokens += 1
        self._entries.append(
            TokenEntry(token.token_id, self._offsets.next(token.token_id), token.logprobs)
        )
        return self._flush(output.text, None) if output.text or self._echo else None

    def end(self, text: str, finish: FinishReason) -> Piece:
        """Return the last piece."""
        if self._discard:
            return self._flush("", FinishReason.LENGTH)
        return self._flush(text, finish)

    def _flush(self, text: str, finish: FinishReason | None) -> Piece:
        entries, self._entries = tuple(self._entries), []
        prompt, self._prompt = self._prompt, ()
        if self._echo is not None:
            text, self._echo = self._echo.text + text, None
        return Piece(text, entries, finish, prompt)


class TextOffsets:
    """Where each token's text starts, in characters of all text."""

    def __init__(self, token_bytes: Callable[[int], bytes], start: int) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    def next(self, token_id: int) -> int:
        """Return where this token starts, and go past it."""
        offset = self._offset
        self._offset += len(self._utf8.decode(self._token_bytes(token_id)))
        return offset


def prompt_entries(
    token_bytes: Callable[[int], bytes],
    prompt_token_ids: Sequence[int],
    logprobs: Sequence[PositionLogprobs],
) -> tuple[TokenEntry, ...]:
    """List an echoed prompt's tokens; the first one has no logprob, as nothing comes before it."""
    offsets = TextOffsets(token_bytes, 0)
    missing = len(prompt_token_ids) - len(logprobs)
    return tuple(
        TokenEntry(token_id, offsets.next(token_id), None if i < missing else logprobs[i - missing])
        for i, token_id in enumerate(prompt_token_ids)
    )


def completion_logprobs(
    entries: Sequence[TokenEntry], token_bytes: Callable[[int], bytes], num_top: int
) -> Json:
    """Return the logprobs of `/v1/completions`; the chosen token is always among the top ones."""
    tops: list[Json | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        listed = (entry.logprobs.chosen, *entry.logprobs.top[:num_top])
        tops.append({_spell(token_bytes(t.token_id)): _finite(t) for t in listed})
    return {
        "text_offset": [e.offset for e in entries],
        "tokens": [_spell(token_bytes(e.token_id)) for e in entries],
        "token_logprobs": [
            None if e.logprobs is None else _finite(e.logprobs.chosen) for e in entries
        ],
        "top_logprobs": tops,
    }


def chat_logprobs(
    entries: Sequence[TokenEntry], token_bytes: Callable[[int], bytes], num_top: int
) -> Json:
    """Return the logprobs of `/v1/chat/completions`."""
    content: list[object] = []
    for entry in entries:
        if entry.logprobs is None:
            continue
        top = [_chat_token(t, token_bytes) for t in entry.logprobs.top[:num_top]]
        content.append({**_chat_token(entry.logprobs.chosen, token_bytes), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob, token_bytes: Callable[[int], bytes]) -> Json:
    raw = token_bytes(token.token_id)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(token), "bytes": list(raw)}


def _spell(raw: bytes) -> str:
    """A token as text; half a character is spelled as OpenAI does, `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _LEAST_LOGPROB)


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Json:
    """Return the usage object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
