"""Reading request bodies within limits of size, time, type and nesting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from cluster.gateway.errors import ApiError
from cluster.gateway.fields import parse_json
from core.config import GatewayConfig

_INLINE_PARSE_BYTES = 64 << 10
"""Larger bodies are parsed and validated in a thread."""
_T = TypeVar("_T")


class BodyReader:
    """Reads JSON bodies. `timeout_s` bounds the whole body."""

    def __init__(self, config: GatewayConfig, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s

    async def read(
        self, request: web.BaseRequest, validate: Callable[[dict[str, object]], _T]
    ) -> _T:
        """Read and parse the body within all limits; return what `validate` makes of it.

        `validate` may run in a thread. Raises `ApiError`.
        """
        raw = await self._read_body(request)

        def work() -> _T:
            return validate(parse_json(raw, self._config.max_json_depth))

        return work() if len(raw) <= _INLINE_PARSE_BYTES else await asyncio.to_thread(work)

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        content_type = request.headers.get("Content-Type")
        if content_type is not None and not _is_json(content_type):
            raise ApiError(415, "The body must be application/json.")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "Compressed bodies are not supported.")
        limit = self._config.max_body_bytes
        too_large = ApiError(413, f"The body may have at most {limit} bytes.")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue":
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, "The body came too slowly.") from None
        except web.RequestPayloadError:
            raise ApiError(400, "The body is not valid HTTP.") from None
        return b"".join(chunks)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
