"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Protocol, TypeVar
from urllib.parse import quote

from aiohttp import web

from cluster.gateway.answer import Answer, StreamLimits, send_stream, send_whole
from cluster.gateway.body import BodyReader
from cluster.gateway.dispatch import Dispatcher, Generation, SpecFactory
from cluster.gateway.errors import ApiError, invalid, overloaded
from cluster.gateway.fields import Fields, check_integer
from cluster.gateway.formats import CallInfo, ChatFormat, CompletionFormat, Format
from cluster.gateway.http import MODEL_PATH, Caller, Routes
from cluster.gateway.metrics import Metrics
from cluster.gateway.prompts import Preparer, Prompt, choice_seed, tenant_salt
from cluster.gateway.responses import ChoiceOutput, EchoedPrompt, Json, dump
from cluster.gateway.stop_strings import ChoiceText
from cluster.gateway.tokenizer import Tokenizer
from cluster.gateway.validation import (
    Options,
    check_model,
    read_chat,
    read_completion,
    read_messages,
)
from cluster.request_events import OutputText, RequestSpec
from core.config import GatewayConfig
from core.ids import RequestId
from core.requests import SamplingParams

RETRY_AFTER_S = 1.0
MAX_DETOKENIZE_CONTEXTS = 16
"""`/detokenize` takes at most so many contexts' worth of tokens."""
_NUM_THREADS = 2
_T = TypeVar("_T")


class Status(Protocol):
    """What `/ready` asks."""

    def not_ready(self) -> str | None:
        """Say why requests cannot be served now; `None` when they can."""
        ...


class Api:
    """The routes of one model. CPU-bound work goes to a bounded thread pool."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        tokenizer: Tokenizer,
        preparer: Preparer,
        dispatcher: Dispatcher,
        metrics: Metrics,
        status: Status,
        bodies: BodyReader,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._status = status
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._num_admitted = 0
        self._created = int(datetime.now(UTC).timestamp())
        self._bodies = bodies

    def routes(self) -> Routes:
        """Return the table of paths and methods."""
        return {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/v1/models": {"GET": self._models},
            MODEL_PATH + self._config.model_name: {"GET": self._model},
            MODEL_PATH + quote(self._config.model_name, safe=""): {"GET": self._model},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    def close(self) -> None:
        """End the threads; running work is left to finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- generation ---

    async def _completions(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        call = await self._bodies.read(
            request,
            lambda body: read_completion(body, self._config, self._tokenizer.vocab_size),
        )
        self._metrics.ignored_fields(len(call.unknown))
        options = call.options
        salt = tenant_salt(caller.salt, options.cache_salt)
        with self._admission(len(call.prompts) * options.n):
            prompts = [
                await self._in_thread(
                    functools.partial(self._preparer.completion, prompt, salt=salt, echo=call.echo)
                )
                for prompt in call.prompts
            ]
            made = CompletionFormat(self._info("cmpl", options))
            return await self._run(request, caller, prompts, options, made, "prompt", call.echo)

    async def _chat(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        call = await self._bodies.read(
            request, lambda body: read_chat(body, self._config, self._tokenizer.vocab_size)
        )
        self._metrics.ignored_fields(len(call.unknown))
        options = call.options
        salt = tenant_salt(caller.salt, options.cache_salt)
        with self._admission(options.n):
            prompt = await self._in_thread(
                lambda: self._preparer.chat(
                    call.messages, add_generation_prompt=call.add_generation_prompt, salt=salt
                )
            )
            made = ChatFormat(self._info("chatcmpl", options))
            return await self._run(request, caller, [prompt], options, made, "messages", False)

    async def _run(
        self,
        request: web.BaseRequest,
        caller: Caller,
        prompts: Sequence[Prompt],
        options: Options,
        form: Format,
        param: str,
        echo: bool,
    ) -> web.StreamResponse:
        seed = secrets.randbits(63) if options.seed is None else options.seed
        choices: list[tuple[SpecFactory, OutputText]] = []
        outputs: list[ChoiceOutput] = []
        for prompt in prompts:
            params = self._preparer.sampling(options, len(prompt.token_ids), param)
            if echo:
                params = dataclasses.replace(params, prompt_logprobs=options.logprobs)
            for i in range(options.n):
                seeded = dataclasses.replace(params, seed=choice_seed(seed, i))
                choices.append((_spec(prompt, seeded, options, self._config), self._text(options)))
                outputs.append(self._output(prompt, options, echo))
        answer = Answer(prompts, options, form, outputs)
        generation = self._generation(request, options.stream)
        self._dispatcher.submit(choices, generation)
        if not options.stream:
            return await send_whole(caller, answer, generation)
        limits = StreamLimits(self._config.ping_interval_s, self._config.stall_timeout_s)
        return await send_stream(request, caller, answer, generation, limits)

    def _text(self, options: Options) -> ChoiceText:
        return ChoiceText(
            self._tokenizer.decoder(skip_special_tokens=options.skip_special_tokens),
            options.stops,
            min_tokens=options.min_tokens,
            include_stop=options.include_stop,
        )

    def _output(self, prompt: Prompt, options: Options, echo: bool) -> ChoiceOutput:
        echoed = EchoedPrompt(prompt.text, prompt.token_ids) if echo else None
        hidden = self._tokenizer.special_token_ids if options.skip_special_tokens else frozenset()
        return ChoiceOutput(
            lambda i: b"" if i in hidden else self._tokenizer.token_bytes(i),
            echoed,
            discard=options.max_tokens == 0,
        )

    def _generation(self, request: web.BaseRequest, stream: bool) -> Generation:
        def abort() -> None:
            if request.transport is not None:
                request.transport.abort()

        # A whole answer is bounded by its tokens, and all of it is wanted at once.
        bound = self._config.stream_buffer_bytes if stream else 1 << 62
        return Generation(bound, abort)

    def _info(self, prefix: str, options: Options) -> CallInfo:
        return CallInfo(
            answer_id=f"{prefix}-{secrets.token_hex(16)}",
            model=self._config.model_name,
            created=int(datetime.now(UTC).timestamp()),
            logprobs=options.logprobs,
            return_token_ids=options.return_token_ids,
            token_bytes=self._tokenizer.token_bytes,
        )

    @contextlib.contextmanager
    def _admission(self, num_choices: int) -> Iterator[None]:
        """Count choices from before tokenising to the end of the answer. Raises `ApiError` 429."""
        if self._num_admitted + num_choices > self._config.max_inflight_requests:
            self._metrics.refused("gateway_full")
            raise overloaded(RETRY_AFTER_S)
        self._num_admitted += num_choices
        try:
            yield
        finally:
            self._num_admitted -= num_choices

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- tokens ---

    async def _tokenize(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        work = await self._bodies.read(request, self._read_tokenize)

        def answer() -> dict[str, object]:
            token_ids = work()
            return {
                "count": len(token_ids),
                "max_model_len": self._config.max_model_len,
                "tokens": list(token_ids),
                "token_strs": [self._tokenizer.token_string(i) for i in token_ids],
            }

        with self._admission(1):
            return _json(await self._in_thread(answer), caller)

    def _read_tokenize(self, body: dict[str, object]) -> Callable[[], Sequence[int]]:
        """Return what tokenises. Raises `ApiError`."""
        fields = Fields(body)
        check_model(fields, self._config.model_name)
        if fields.get("messages") is not None:
            messages = read_messages(fields)
            add_prompt = fields.boolean("add_generation_prompt", True)
            return lambda: (
                self._preparer.chat(messages, add_generation_prompt=add_prompt, salt="").token_ids
            )
        text = fields.text("prompt", self._config.max_body_bytes)
        if text is None:
            raise invalid("prompt", "`prompt` or `messages` is needed.")
        add_special = fields.boolean("add_special_tokens", True)
        return lambda: self._preparer.encode("prompt", text, add_special_tokens=add_special)

    async def _detokenize(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        token_ids = await self._bodies.read(request, self._read_detokenize)
        with self._admission(1):
            text = await self._in_thread(
                lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False)
            )
        return _json({"prompt": text}, caller)

    def _read_detokenize(self, body: dict[str, object]) -> list[int]:
        fields = Fields(body)
        check_model(fields, self._config.model_name)
        if fields.get("tokens") is None:
            raise invalid("tokens", "`tokens` is needed.")
        items = fields.items("tokens", MAX_DETOKENIZE_CONTEXTS * self._config.max_model_len)
        bound = self._tokenizer.vocab_size - 1
        return [check_integer("tokens", item, 0, bound) for item in items]

    # --- about the server ---

    async def _health(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return web.Response(headers={"X-Request-Id": caller.request_id})

    async def _ready(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        reason = self._status.not_ready()
        if reason is not None:
            raise ApiError(
                503, f"Not ready: {reason}.", kind="server_error", code="not_ready",
                retry_after_s=RETRY_AFTER_S,
            )  # fmt: skip
        return web.Response(headers={"X-Request-Id": caller.request_id})

    async def _metrics_text(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _version(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return _json({"version": _version()}, caller)

    async def _load(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return _json({"server_load": self._dispatcher.num_requests}, caller)

    async def _models(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card()]}, caller)

    async def _model(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        return _json(self._card(), caller)

    def _card(self) -> Json:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "halfmoon",
            "max_model_len": self._config.max_model_len,
        }


def _version() -> str:
    try:
        return importlib.metadata.version("halfmoon")
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        return "unknown"


def _spec(
    prompt: Prompt, params: SamplingParams, options: Options, config: GatewayConfig
) -> SpecFactory:
    def make(request: RequestId) -> RequestSpec:
        return RequestSpec(
            request=request,
            prompt_token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes,
            root=prompt.root,
            block_size=config.block_size,
            params=params,
            priority=options.priority,
            reuse=params.prompt_logprobs is None,
        )

    return make


def _json(body: Json, caller: Caller) -> web.Response:
    return web.Response(
        body=dump(body),
        content_type="application/json",
        headers={"X-Request-Id": caller.request_id},
    )
