"""From the outputs of a call's choices to its answer: whole, or as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from aiohttp import web

from cluster.gateway import errors
from cluster.gateway.dispatch import Generation, Output
from cluster.gateway.errors import ApiError
from cluster.gateway.formats import Format
from cluster.gateway.http import Caller
from cluster.gateway.prompts import Prompt
from cluster.gateway.responses import (
    SSE_DONE,
    SSE_PING,
    ChoiceOutput,
    Json,
    Piece,
    dump,
    join_pieces,
    sse,
    usage,
)
from cluster.gateway.validation import Options
from cluster.request_events import (
    Abandoned,
    EndRequest,
    EngineFailed,
    Finished,
    NeverFits,
    Outcome,
    Overloaded,
    StreamToken,
    Unavailable,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """An answer in the making. Choice i belongs to prompt `i // n`.

    A prompt is counted once, however many choices it has; its cached tokens are those that the
    prefill of its first choice skipped on the first attempt that gave a token.
    """

    prompts: Sequence[Prompt]
    options: Options
    format: Format
    outputs: Sequence[ChoiceOutput]
    num_open: int = field(init=False)
    num_cached_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_open = len(self.outputs)

    def take(self, index: int, output: Output) -> Piece | None:
        """Take an output; return a piece if there is something to show. Raises `ApiError`."""
        match output:
            case StreamToken(token):
                if token.seq == 0 and token.stats is not None and index % self.options.n == 0:
                    stats = token.stats
                    self.num_cached_tokens += stats.cached_local_tokens + stats.cached_pool_tokens
                return self.outputs[index].take(output)
            case EndRequest(Finished(reason), text):
                self.num_open -= 1
                return self.outputs[index].end(text, reason)
            case EndRequest(outcome):
                raise _error(outcome)
            case _:
                assert_never(output)

    def usage(self) -> Json:
        """Return the usage so far."""
        num_prompt_tokens = sum(len(p.token_ids) for p in self.prompts)
        num_output_tokens = sum(o.num_tokens for o in self.outputs)
        return usage(num_prompt_tokens, self.num_cached_tokens, num_output_tokens)

    async def whole(self, generation: Generation) -> Json:
        """Wait for every choice and return the body. Raises `ApiError`."""
        pieces: list[list[Piece]] = [[] for _ in self.outputs]
        while self.num_open:
            index, output = await generation.next()
            piece = self.take(index, output)
            if piece is not None:
                pieces[index].append(piece)
        n = self.options.n
        choices = [(join_pieces(p), self.prompts[i // n].token_ids) for i, p in enumerate(pieces)]
        return {**self.format.whole(choices), "usage": self.usage()}

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Encode one chunk, with what the stream options say of usage."""
        return self._event(self.format.chunk(index, piece))

    def opening(self) -> bytes:
        """Encode what comes before any output."""
        return b"".join(self._event(c) for c in self.format.opening(len(self.outputs)))

    def closing(self) -> bytes:
        """Encode what comes after all output."""
        if not self.options.include_usage:
            return SSE_DONE
        return sse({**self.format.closing(), "usage": self.usage()}) + SSE_DONE

    def _event(self, body: Json) -> bytes:
        if self.options.continuous_usage:
            body["usage"] = self.usage()
        elif self.options.include_usage:
            body["usage"] = None
        return sse(body)


def _error(outcome: Outcome) -> ApiError:
    match outcome:
        case Overloaded(retry_after_s):
            return errors.overloaded(retry_after_s)
        case Unavailable(retry_after_s):
            return errors.unavailable(retry_after_s)
        case NeverFits():
            return ApiError(
                400,
                "This request needs more memory for its context than any worker has.",
                code="context_length_exceeded",
            )
        case EngineFailed():
            return ApiError(
                500, "The model failed on this request.", kind="server_error", code="server_error"
            )
        case Abandoned():  # a client that is still there to read it was left by us
            return errors.shutting_down(1.0)
        case Finished():
            raise AssertionError("a finished choice is no error")
        case _:
            assert_never(outcome)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`ping_s`: silence after which a comment is sent. `write_s`: how long one write may take."""

    ping_s: float
    write_s: float


async def send_whole(caller: Caller, answer: Answer, generation: Generation) -> web.StreamResponse:
    """Answer when everything is there. A client that leaves ends the generation."""
    try:
        body = await answer.whole(generation)
    finally:
        generation.abandon()
    return web.Response(
        body=dump(body),
        content_type="application/json",
        headers={"X-Request-Id": caller.request_id},
    )


async def send_stream(
    request: web.BaseRequest,
    caller: Caller,
    answer: Answer,
    generation: Generation,
    limits: StreamLimits,
) -> web.StreamResponse:
    """Stream the answer. An error before the first byte is raised and gets a status of its own.

    The stream begins with the first output, or with a ping once the request has a place.
    """
    try:
        while (first := await _next_or_silence(generation, limits.ping_s)) is None:
            if generation.placed.is_set():
                break
        # Raises before the answer has begun. The opening comes first, with the usage of then.
        opening = answer.opening()
        events = SSE_PING if first is None else _event(answer, *first)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "X-Request-Id": caller.request_id,
            }
        )
        await response.prepare(request)
        stream = _Stream(request, response, limits.write_s)
        await _send_rest(stream, answer, generation, limits, caller, opening + events)
        await response.write_eof()
        return response
    finally:
        generation.abandon()


async def _send_rest(
    stream: _Stream,
    answer: Answer,
    generation: Generation,
    limits: StreamLimits,
    caller: Caller,
    events: bytes,
) -> None:
    """Write `events`, then what comes, until every choice has ended; then the closing."""
    while answer.num_open:
        await stream.write(events)
        events = b""
        taken = await _next_or_silence(generation, limits.ping_s)
        if taken is None:
            events = SSE_PING
            continue
        try:
            while taken is not None:  # what came at once goes out at once
                events += _event(answer, *taken)
                taken = generation.next_nowait()
        except ApiError as error:
            log.warning("request %s failed in its stream: %s", caller.request_id, error)
            await stream.write(events + sse(error.body()))
            stream.response.force_close()
            return
    await stream.write(events + answer.closing())


def _event(answer: Answer, index: int, output: Output) -> bytes:
    piece = answer.take(index, output)
    return b"" if piece is None else answer.chunk(index, piece)


async def _next_or_silence(generation: Generation, silence_s: float) -> tuple[int, Output] | None:
    try:
        async with asyncio.timeout(silence_s):
            return await generation.next()
    except TimeoutError:
        return None


class _Stream:
    """Writes that do not wait for ever."""

    def __init__(
        self, request: web.BaseRequest, response: web.StreamResponse, write_s: float
    ) -> None:
        self.response = response
        self._request = request
        self._write_s = write_s

    async def write(self, raw: bytes) -> None:
        """Write, waiting while the client's buffer is full. Raises `ConnectionError`."""
        if not raw:
            return
        try:
            async with asyncio.timeout(self._write_s):
                await self.response.write(raw)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None
