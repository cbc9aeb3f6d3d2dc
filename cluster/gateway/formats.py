"""The two shapes of an answer: completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.gateway.responses import (
    Json,
    Piece,
    TokenEntry,
    chat_logprobs,
    completion_logprobs,
)


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What all parts of one answer share. `created` is in Unix seconds."""

    answer_id: str
    model: str
    created: int
    logprobs: int | None
    return_token_ids: bool
    token_bytes: Callable[[int], bytes]


class Format(Protocol):
    """Makes the JSON of one endpoint."""

    def opening(self, num_choices: int) -> list[Json]:
        """Return the chunks that come before any output."""
        ...

    def chunk(self, index: int, piece: Piece) -> Json:
        """Return one chunk, without usage."""
        ...

    def closing(self) -> Json:
        """Return the chunk that carries the usage alone."""
        ...

    def whole(self, choices: Sequence[tuple[Piece, Sequence[int]]]) -> Json:
        """Return the answer, without usage. A choice comes with its prompt's token ids."""
        ...


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, info: CallInfo) -> None:
        self._info = info

    def opening(self, num_choices: int) -> list[Json]:
        """See `Format`."""
        return []

    def chunk(self, index: int, piece: Piece) -> Json:
        """See `Format`."""
        return self._body([self._choice(index, piece)])

    def closing(self) -> Json:
        """See `Format`."""
        return self._body([])

    def whole(self, choices: Sequence[tuple[Piece, Sequence[int]]]) -> Json:
        """See `Format`."""
        made = []
        for index, (piece, prompt_ids) in enumerate(choices):
            choice = self._choice(index, piece)
            if self._info.return_token_ids:
                choice["prompt_token_ids"] = list(prompt_ids)
            made.append(choice)
        return self._body(made)

    def _choice(self, index: int, piece: Piece) -> Json:
        info = self._info
        logprobs = None
        entries = (*piece.prompt, *piece.entries)
        if info.logprobs is not None and entries:
            logprobs = completion_logprobs(entries, info.token_bytes, info.logprobs)
        choice: Json = {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }
        return _with_token_ids(choice, info, piece.entries)

    def _body(self, choices: list[Json]) -> Json:
        return _body(self._info, "text_completion", choices)


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, info: CallInfo) -> None:
        self._info = info

    def opening(self, num_choices: int) -> list[Json]:
        """See `Format`."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": i, "delta": delta, "logprobs": None, "finish_reason": None})
            for i in range(num_choices)
        ]

    def chunk(self, index: int, piece: Piece) -> Json:
        """See `Format`."""
        choice: Json = {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.entries),
            "finish_reason": piece.finish,
        }
        return self._chunk(_with_token_ids(choice, self._info, piece.entries))

    def closing(self) -> Json:
        """See `Format`."""
        return _body(self._info, "chat.completion.chunk", [])

    def whole(self, choices: Sequence[tuple[Piece, Sequence[int]]]) -> Json:
        """See `Format`."""
        made = []
        for index, (piece, _) in enumerate(choices):
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece.entries),
                "finish_reason": piece.finish,
            }
            made.append(_with_token_ids(choice, self._info, piece.entries))
        body = _body(self._info, "chat.completion", made)
        if self._info.return_token_ids:
            body["prompt_token_ids"] = list(choices[0][1])
        return body

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Json | None:
        info = self._info
        if info.logprobs is None or not entries:
            return None
        return chat_logprobs(entries, info.token_bytes, info.logprobs)

    def _chunk(self, choice: Json) -> Json:
        return _body(self._info, "chat.completion.chunk", [choice])


def _with_token_ids(choice: Json, info: CallInfo, entries: Sequence[TokenEntry]) -> Json:
    if info.return_token_ids:
        choice["token_ids"] = [e.token_id for e in entries]
    return choice


def _body(info: CallInfo, kind: str, choices: list[Json]) -> Json:
    return {
        "id": info.answer_id,
        "object": kind,
        "created": info.created,
        "model": info.model,
        "choices": choices,
    }
