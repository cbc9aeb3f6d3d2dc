"""The HTTP server: what holds for every route, before and around it.

aiohttp's low-level server, because our routing is one table and every answer, also to malformed
HTTP, must have OpenAI's error body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from cluster.gateway.errors import ApiError, internal, model_not_found, too_many_connections
from cluster.gateway.metrics import Metrics
from core.config import GatewayConfig
from core.errors import ConfigError

log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 128 << 10
_MAX_HEADERS = 128
_MAX_SURPLUS = 128
_SURPLUS_S = 1.0
"""So many connections over the limit, for so long, are kept to be refused with an answer."""
_ABSOLUTE_FORM = re.compile(r"^https?://[^/]*", re.IGNORECASE)
"""How a request names its target when it comes through a proxy (RFC 9112, 3.2.2)."""
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: `salt` separates tenants' cached blocks; `request_id` is for the client only."""

    salt: str
    request_id: str


Route = Callable[[web.BaseRequest, Caller], Awaitable[web.StreamResponse]]
Routes = Mapping[str, Mapping[str, Route]]
"""Path, then method."""

MODEL_PATH = "/v1/models/"
"""What follows names a model, where there is no route."""


class ApiKeys:
    """The keys that may call, as digests only. No key configured means everybody may."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [sha256(k.encode()).digest() for k in keys]

    def salt(self, authorization: str | None) -> str:
        """Return the tenant's salt. Raises `ApiError` 401. Takes the same time for every key."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        presented = sha256(key.strip().encode(errors="surrogateescape")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, presented)
        if not found or scheme.lower() != "bearer":
            raise ApiError(401, "Missing or unknown API key.", code="invalid_api_key")
        return blake2b(presented, digest_size=16, person=b"halfmoon-tenant").hexdigest()


class HttpServer:
    """Serves `routes`; all but `open_paths` need an API key once one is configured."""

    def __init__(
        self,
        routes: Routes,
        config: GatewayConfig,
        metrics: Metrics,
        *,
        open_paths: frozenset[str] = frozenset({"/health"}),
        head_timeout_s: float,
    ) -> None:
        self._routes = routes
        self._config = config
        self._metrics = metrics
        self._open_paths = open_paths
        self._head_timeout_s = head_timeout_s
        self._keys = ApiKeys(config.api_keys)
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises `ConfigError` when the address cannot be had."""
        server = _Server(self._handle, self._config, self._head_timeout_s)
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); "
                "choose another address with --host and --port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening and end all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    # --- around every route ---

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, _Protocol):
            request.protocol.head_came()
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _VALID_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        try:
            response = await self._route(request, request_id)
        except ApiError as error:
            response = error_response(error, request_id)
            if not request.content.is_eof():
                response.force_close()  # what is left of the body is not read
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # (a bug in one request must not take the others along)
            log.exception("request %s failed", request_id)
            response = error_response(internal(request_id), request_id)
            response.force_close()
        if _is_surplus(request):
            response.force_close()
        self._metrics.answered(response.status)
        return response

    async def _route(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        size = sum(len(k) + len(v) + 4 for k, v in request.raw_headers)
        if size > self._config.max_header_bytes:
            raise header_too_large(self._config.max_header_bytes)
        # The raw path: `/health/../v1/models` and `/%68ealth` are other paths than `/health`.
        path = _ABSOLUTE_FORM.sub("", request.raw_path.partition("?")[0])
        salt = ""
        if path not in self._open_paths:
            if _is_surplus(request):
                self._metrics.refused("connections_full")
                raise too_many_connections(_SURPLUS_S)
            salt = self._keys.salt(request.headers.get("Authorization"))
        methods = self._routes.get(path)
        if methods is None and path.startswith(MODEL_PATH):
            raise model_not_found(unquote(path.removeprefix(MODEL_PATH)))
        if methods is None:
            raise ApiError(404, "There is nothing at this path.", code="not_found")
        method = "GET" if request.method == "HEAD" else request.method
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(methods)
            raise ApiError(405, f"This path allows {allowed} only.", code="method_not_allowed")
        return await route(request, Caller(salt, request_id))


def error_response(error: ApiError, request_id: str) -> web.Response:
    """Make the answer for an error."""
    headers = {"X-Request-Id": request_id}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status,
        body=json.dumps(error.body()).encode(),
        content_type="application/json",
        headers=headers,
    )


def header_too_large(limit: int) -> ApiError:
    """Make the error for headers over the limit."""
    return ApiError(431, f"The headers may have at most {limit} bytes in {_MAX_HEADERS} lines.")


def _slow_head() -> bytes:
    body = json.dumps(ApiError(408, "The headers came too slowly.").body())
    return (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


_SLOW_HEAD = _slow_head()


def _is_surplus(request: web.BaseRequest) -> bool:
    return isinstance(request.protocol, _Protocol) and request.protocol.is_surplus


class _Protocol(web.RequestHandler):
    """Answers malformed HTTP with our error body too, and bounds what the kernel buffers."""

    __slots__ = ("_has_begun", "_head_timer", "is_surplus")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        assert isinstance(self._manager, _Server)
        self._has_begun = False
        self._head_timer = asyncio.get_running_loop().call_later(
            self._manager.head_timeout_s, self._refuse_slow_head
        )
        num_surplus = self._manager.num_surplus
        self.is_surplus = num_surplus > 0
        if num_surplus > _MAX_SURPLUS:
            transport.abort()
            return
        if self.is_surplus:
            asyncio.get_running_loop().call_later(_SURPLUS_S, transport.abort)
        # Left alone, it grows to several MB before a client that does not read is noticed.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def head_came(self) -> None:
        """Take note of a whole head; later ones are bounded by the time between two requests."""
        self._head_timer.cancel()

    def _refuse_slow_head(self) -> None:
        """End a connection whose first head has begun and is not whole in time."""
        if self.transport is not None and self._has_begun:
            self.transport.write(_SLOW_HEAD)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # aiohttp has no class of its own for too many lines.
        is_many = isinstance(exc, BadHttpMessage) and exc.message.startswith("Too many headers")
        if is_many or isinstance(exc, LineTooLong):
            error = header_too_large(self.max_field_size)
        elif status < 500:
            error = ApiError(status, "The request is not valid HTTP.")
        else:
            reference = secrets.token_hex(16)
            if isinstance(exc, ConnectionError):
                log.info("a client left: %s", exc)
            else:
                log.error("connection failed, reference %s", reference, exc_info=exc)
            error = internal(reference)
        response = error_response(error, secrets.token_hex(16))
        response.force_close()
        return response


class _Server(web.Server):
    """Makes our protocol for each connection, and counts those over `max_connections`."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        config: GatewayConfig,
        head_timeout_s: float,
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=config.keep_alive_s,
            max_line_size=config.max_header_bytes,
            max_field_size=config.max_header_bytes,
            max_headers=_MAX_HEADERS,
            lingering_time=0,
            auto_decompress=False,
        )
        self._max_connections = config.max_connections
        self.head_timeout_s = head_timeout_s

    @property
    def num_surplus(self) -> int:
        """Connections over the limit; negative below it."""
        return len(self._connections) - self._max_connections

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)
