"""Making connections: `dial` and `listen`, over TCP and Unix sockets.

What a connection does is in `core.connection`, how both sides prove who they are in
`core.greeting`; what users of either need can be imported from here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from core.connection import (
    HEARTBEAT_S,
    MAX_CONCURRENT_REQUESTS,
    BaseHandler,
    Buffers,
    Connection,
    Handler,
    Reply,
)
from core.errors import ConnectionLost, HalfmoonError
from core.greeting import Identity, greet_as_client, greet_as_server
from core.ids import Address, Incarnation
from core.wire import MessageSet

__all__ = [
    "HEARTBEAT_S",
    "MAX_CONCURRENT_REQUESTS",
    "BaseHandler",
    "Buffers",
    "Connection",
    "Endpoint",
    "Handler",
    "Identity",
    "Listener",
    "Reply",
    "Sets",
    "UnixEndpoint",
    "dial",
    "listen",
]

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A socket file on this host, in a directory of mode 0700."""

    path: Path


Endpoint = Address | UnixEndpoint

Sets = Callable[[str], tuple[MessageSet, MessageSet]]
"""From a peer's kind to (what is received from it, what is sent to it); `WireError` to refuse."""


class Listener:
    """A listening socket and the connections it accepted."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.connections: set[Connection] = set()
        self._sock = sock
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[socket.socket] = set()  # whose greeting is not over
        self._retry: asyncio.TimerHandle | None = None

    def start(self, accept: Callable[[socket.socket], Awaitable[Connection | None]]) -> None:
        """Begin to accept."""
        # Not a task on sock_accept: cancelled at the wrong moment, it would lose a socket.
        asyncio.get_running_loop().add_reader(self._sock, self._accept_one, accept)

    def _accept_one(self, accept: Callable[[socket.socket], Awaitable[Connection | None]]) -> None:
        try:
            client, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor left: try again when some may be free
            log.warning("cannot accept at %s: %s", self.endpoint, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            self._retry = loop.call_later(1.0, self.start, accept)
            return
        self._clients.add(client)
        self._spawn(self._admit(accept, client))

    async def _admit(
        self,
        accept: Callable[[socket.socket], Awaitable[Connection | None]],
        client: socket.socket,
    ) -> None:
        try:
            conn = await accept(client)
        finally:
            self._clients.discard(client)
        if conn is not None:
            self.connections = {c for c in self.connections if not c.closed} | {conn}

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop accepting and close every accepted connection. Calling it twice is allowed."""
        if self._retry is not None:
            self._retry.cancel()
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            client.close()
        if isinstance(self.endpoint, UnixEndpoint):
            self.endpoint.path.unlink(missing_ok=True)
        for conn in self.connections:
            conn.close("shutting down")
            await conn.wait_closed()


async def listen(
    endpoint: Endpoint,
    handler: Handler,
    *,
    identity: Identity,
    secret: bytes,
    sets: Sets,
    heartbeat_s: float = HEARTBEAT_S,
) -> Listener:
    """Listen at `endpoint` (port 0 picks one; see `Listener.endpoint`). Raises `OSError`."""
    if isinstance(endpoint, Address):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target: object = (endpoint.host, endpoint.port)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        endpoint.path.unlink(missing_ok=True)
        target = str(endpoint.path)
    try:
        sock.setblocking(False)
        sock.bind(target)  # type: ignore[arg-type]
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    if isinstance(endpoint, Address):
        endpoint = Address(endpoint.host, sock.getsockname()[1])
    else:
        endpoint.path.chmod(0o600)
    listener = Listener(sock, endpoint)

    async def accept(client: socket.socket) -> Connection | None:
        try:
            return await _accept(client, handler, identity, secret, sets, heartbeat_s)
        except (HalfmoonError, OSError, TimeoutError) as error:
            log.warning("refused a connection to %s: %s", identity.name, error)
            client.close()
            return None
        except BaseException:
            client.close()
            raise

    listener.start(accept)
    return listener


async def dial(
    endpoint: Endpoint,
    handler: Handler,
    *,
    identity: Identity,
    secret: bytes,
    sends: MessageSet,
    receives: MessageSet,
    expect: Incarnation | None = None,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    heartbeat_s: float = HEARTBEAT_S,
) -> Connection:
    """Connect and authenticate. Raises `ConnectionLost`, `AuthError` or `WireError`.

    `expect` refuses any other incarnation behind the address (`ConnectionLost`): the one that was
    meant is gone.
    """
    family = socket.AF_INET if isinstance(endpoint, Address) else socket.AF_UNIX
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            target: object = (
                (endpoint.host, endpoint.port)
                if isinstance(endpoint, Address)
                else str(endpoint.path)
            )
            await loop.sock_connect(sock, target)  # type: ignore[arg-type]
            _tune(sock)
            peer, keys = await greet_as_client(sock, identity, secret)
    except (OSError, TimeoutError) as error:
        sock.close()
        raise ConnectionLost(f"{endpoint}: {error or 'timed out'}") from error
    except BaseException:
        sock.close()
        raise
    if expect is not None and peer.incarnation != expect:
        sock.close()
        raise ConnectionLost(f"{peer.name} is now {peer.incarnation}, not {expect}")
    return Connection(sock, peer, handler, keys, sends, receives, heartbeat_s)


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _accept(
    client: socket.socket,
    handler: Handler,
    identity: Identity,
    secret: bytes,
    sets: Sets,
    heartbeat_s: float,
) -> Connection:
    client.setblocking(False)
    _tune(client)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        peer, keys = await greet_as_server(client, identity, secret)
    receives, sends = sets(peer.kind)
    return Connection(client, peer, handler, keys, sends, receives, heartbeat_s)
