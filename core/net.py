"""Authenticated connections that carry framed messages and raw payloads (`docs/wire.md`).

One asyncio loop owns a connection; nothing here is thread-safe. Life of a connection:

1. Challenge and response over the cluster secret, both ways; each side learns who the other is
   (kind, name, incarnation). A client may insist on an incarnation.
2. Frames both ways, each with a MAC over a session key and a counter. One-way messages are handled
   in order; requests run as tasks, at most `MAX_CONCURRENT_REQUESTS` at a time, and are answered
   by correlation id.
3. Pings when idle. Silence of three heartbeats, a broken socket, a wrong frame, or a peer that
   does not drain its queue ends it: every pending request fails with `ConnectionLost`, and the
   handler is told once.

Payloads are received straight into the memory that `payload_target` names, and sent from the
caller's buffers without a copy; the buffers must stay unchanged until `send` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgpack

from core.errors import AuthError, ConnectionLost, HalfmoonError, RemoteError, WireError
from core.ids import Address, Incarnation
from core.wire import (
    PRELUDE_BYTES,
    PROTOCOL_VERSION,
    ErrorReply,
    FrameKind,
    Message,
    MessageSet,
    Prelude,
    parse_prelude,
    seal,
    verify,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
HANDSHAKE_TIMEOUT_S = 5.0
MAX_CONCURRENT_REQUESTS = 64
MAX_QUEUED_BYTES = 64 << 20
_MAX_HELLO_BYTES = 1024
_READ_BYTES = 64 << 10

Buffers = Sequence[memoryview | bytes]
Reply = Message | tuple[Message, Buffers] | tuple[Message, Buffers, Callable[[], None]]
"""An answer, its payload, and who is told when the payload's memory is no longer needed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is to its peers: `kind` is e.g. `prefill`, `name` unique in the cluster."""

    kind: str
    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A socket file on this host, in a directory of mode 0700."""

    path: Path


Endpoint = Address | UnixEndpoint


class Handler(Protocol):
    """Receives what a connection brings. All methods run in the loop; only `on_request` waits."""

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        """Take a one-way message. `payload` is `None` when `payload_target` took it."""
        ...

    async def on_request(self, conn: Connection, message: Message) -> Reply:
        """Answer a request. `HalfmoonError` becomes an ERROR frame."""
        ...

    def payload_target(
        self, conn: Connection, message: Message, payload_bytes: int
    ) -> Sequence[memoryview] | None:
        """Where a one-way message's payload goes (`payload_bytes` in all), before it is read.

        `None` means a fresh `bytes`. The memory must stay valid until `on_message` or `on_closed`.
        """
        ...

    def on_closed(self, conn: Connection, reason: str) -> None:
        """The connection ended. Called exactly once."""
        ...


class BaseHandler:
    """A handler that refuses everything; receivers override what they understand."""

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        """Refuse: the peer broke the protocol."""
        raise WireError(f"unexpected {type(message).__name__} from {conn.peer.kind}")

    async def on_request(self, conn: Connection, message: Message) -> Reply:
        """Refuse: the peer broke the protocol."""
        raise WireError(f"unexpected request {type(message).__name__} from {conn.peer.kind}")

    def payload_target(
        self, conn: Connection, message: Message, payload_bytes: int
    ) -> Sequence[memoryview] | None:
        """Take payloads as fresh bytes."""
        return None

    def on_closed(self, conn: Connection, reason: str) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Pending:
    """A request that waits for its reply; `into` takes the reply's payload."""

    future: asyncio.Future[tuple[Message, bytes | None]]
    into: Sequence[memoryview] | None
    reading: bool = False


class Connection:
    """One authenticated connection; made by `dial` and `listen`."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Identity,
        handler: Handler,
        keys: tuple[bytes, bytes],
        sends: MessageSet,
        receives: MessageSet,
        heartbeat_s: float,
    ) -> None:
        self.peer = peer
        self.closed = False
        self._sock = sock
        self._handler = handler
        self._send_key, self._receive_key = keys
        self._sends, self._receives = sends, receives
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._send_counter = self._receive_counter = self._next_correlation = 0
        self._pending: dict[int, _Pending] = {}
        self._buffer = bytearray(_READ_BYTES)
        self._start = self._end = 0
        self._outgoing: deque[tuple[list[memoryview], asyncio.Future[None] | None]] = deque()
        self._queued_bytes = 0
        self._wake_writer = asyncio.Event()
        self._last_received_s = self._last_sent_s = self._loop.time()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._request_tasks: set[asyncio.Task[None]] = set()
        self._tasks = [
            self._loop.create_task(self._guard(work))
            for work in (self._read_forever, self._write_forever, self._beat_forever)
        ]

    def __repr__(self) -> str:
        return f"<Connection to {self.peer.kind} {self.peer.name}/{self.peer.incarnation}>"

    # --- sending ---

    def post(self, message: Message) -> None:
        """Queue a one-way message. Raises `ConnectionLost` when closed or the peer is too slow."""
        self._enqueue(FrameKind.ONE_WAY, 0, message, (), None)

    async def send(self, message: Message, payload: Buffers = ()) -> None:
        """Send a one-way message and wait until the kernel has all its bytes."""
        sent = self._loop.create_future()
        self._enqueue(FrameKind.ONE_WAY, 0, message, payload, sent)
        await sent

    async def request(
        self, message: Message, *, timeout_s: float, into: Sequence[memoryview] | None = None
    ) -> tuple[Message, bytes | None]:
        """Send a request and wait for its reply and the reply's payload.

        `into` receives the payload and must be of its exact size, else the connection is closed.
        Raises `RemoteError` (the peer refused), `ConnectionLost`, or `TimeoutError`. Giving up
        while the payload arrives closes the connection, because `into` belongs to the transfer.
        """
        self._next_correlation += 1
        correlation = self._next_correlation
        pending = _Pending(self._loop.create_future(), into)
        self._pending[correlation] = pending
        try:
            self._enqueue(FrameKind.REQUEST, correlation, message, (), None)
            # Not `wait_for`: in Python 3.11 that loses a cancellation that meets the reply.
            async with asyncio.timeout(timeout_s):
                return await pending.future
        finally:
            self._pending.pop(correlation, None)
            if pending.reading:
                self.close("gave up in the middle of a reply")

    def _enqueue(
        self,
        kind: FrameKind,
        correlation: int,
        message: Message | None,
        payload: Buffers,
        sent: asyncio.Future[None] | None,
    ) -> None:
        if self.closed:
            raise ConnectionLost(f"{self.peer.kind} {self.peer.name} is gone")
        header = b"" if message is None else self._sends.encode(message)
        views = [v for v in (memoryview(b).cast("B") for b in payload) if v.nbytes]
        payload_bytes = sum(v.nbytes for v in views)
        frame = seal(self._send_key, self._send_counter, kind, correlation, header, payload_bytes)
        self._send_counter += 1
        self._last_sent_s = self._loop.time()
        views.insert(0, memoryview(frame))
        if not self._outgoing:
            views = self._send_now(views)
            if not views:
                if sent is not None:
                    sent.set_result(None)
                return
        self._outgoing.append((views, sent))
        # Payloads are bounded by whoever waits for `sent`; frames nobody waits for are counted.
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self.close("the peer does not read")
            raise ConnectionLost(f"{self.peer.kind} {self.peer.name} does not read")
        self._wake_writer.set()

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        """Give the kernel what it takes at once; return the rest."""
        try:
            sent = self._sock.sendmsg(views[:64])
        except (BlockingIOError, InterruptedError):
            return views
        except OSError as error:
            self.close(f"send failed: {error}")
            raise ConnectionLost(str(error)) from error
        rest = list(views)
        while rest and sent >= rest[0].nbytes:
            sent -= rest.pop(0).nbytes
        if rest and sent:
            rest[0] = rest[0][sent:]
        return rest

    async def _write_forever(self) -> None:
        while True:
            await self._wake_writer.wait()
            self._wake_writer.clear()
            while self._outgoing:
                views, sent = self._outgoing[0]
                for view in views:
                    await self._loop.sock_sendall(self._sock, view)
                    self._last_sent_s = self._loop.time()
                self._outgoing.popleft()
                if not self._outgoing:
                    self._queued_bytes = 0
                if sent is not None and not sent.done():
                    sent.set_result(None)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s / 2)
            now_s = self._loop.time()
            if now_s - self._last_received_s > 3 * self._heartbeat_s:
                raise ConnectionLost("silent for three heartbeats")
            if now_s - self._last_sent_s >= self._heartbeat_s and not self._outgoing:
                self._enqueue(FrameKind.PING, 0, None, (), None)

    # --- receiving ---

    async def _read_forever(self) -> None:
        while True:
            prelude_raw = await self._read_bytes(PRELUDE_BYTES)
            prelude = parse_prelude(prelude_raw)
            header = await self._read_bytes(prelude.header_bytes)
            verify(self._receive_key, self._receive_counter, prelude, header)
            self._receive_counter += 1
            if prelude.kind is not FrameKind.PING:
                await self._receive(prelude, self._receives.decode(header))

    async def _receive(self, prelude: Prelude, message: Message) -> None:
        match prelude.kind:
            case FrameKind.ONE_WAY:
                payload = await self._read_payload(
                    prelude.payload_bytes,
                    self._handler.payload_target(self, message, prelude.payload_bytes)
                    if prelude.payload_bytes
                    else None,
                )
                self._handler.on_message(self, message, payload)
            case FrameKind.REQUEST:
                if prelude.payload_bytes:
                    raise WireError("a request carries no payload")
                await self._slots.acquire()
                task = self._loop.create_task(self._answer(prelude.correlation, message))
                self._request_tasks.add(task)
                task.add_done_callback(self._request_tasks.discard)
            case FrameKind.REPLY | FrameKind.ERROR:
                await self._receive_reply(prelude, message)
            case FrameKind.PING:
                raise WireError("a ping carries no message")

    async def _receive_reply(self, prelude: Prelude, message: Message) -> None:
        pending = self._pending.get(prelude.correlation)
        if pending is not None:
            pending.reading = True
        # An error brings no payload and leaves `into` alone.
        is_reply = prelude.kind is FrameKind.REPLY
        payload = await self._read_payload(
            prelude.payload_bytes, pending.into if pending is not None and is_reply else None
        )
        if pending is None or pending.future.done():
            return  # the caller gave up before the reply began
        pending.reading = False
        if prelude.kind is FrameKind.ERROR:
            if not isinstance(message, ErrorReply):
                raise WireError("an error frame carries an ErrorReply")
            pending.future.set_exception(RemoteError(message.code, message.detail))
        else:
            pending.future.set_result((message, payload))

    async def _answer(self, correlation: int, message: Message) -> None:
        body: Message
        payload: Buffers = ()
        done: Callable[[], None] = _nothing
        try:
            reply = await self._handler.on_request(self, message)
            body, payload, done = _parts(reply)
            kind = FrameKind.REPLY
        except HalfmoonError as error:
            body, kind = ErrorReply(type(error).__name__, str(error)), FrameKind.ERROR
        except Exception:  # (a bug in one request must not take the others along)
            log.exception("request %s from %s failed", type(message).__name__, self.peer.name)
            body, kind = ErrorReply("InternalError", "see the log of the peer"), FrameKind.ERROR
        finally:
            self._slots.release()
        try:
            sent = self._loop.create_future() if payload else None
            self._enqueue(kind, correlation, body, payload, sent)
            if sent is not None:
                await sent
        except ConnectionLost:
            pass  # nobody is left to answer
        finally:
            done()

    async def _read_payload(
        self, payload_bytes: int, target: Sequence[memoryview] | None
    ) -> bytes | None:
        if target is None:
            return bytes(await self._read_bytes(payload_bytes)) if payload_bytes else None
        if sum(v.nbytes for v in target) != payload_bytes:
            raise WireError(f"a payload of {payload_bytes} bytes does not fit where it belongs")
        for view in target:
            await self._read_into(view.cast("B"))
        return None

    async def _read_bytes(self, num_bytes: int) -> bytearray:
        raw = bytearray(num_bytes)
        await self._read_into(memoryview(raw))
        return raw

    async def _read_into(self, view: memoryview) -> None:
        """Fill `view`: first from what is buffered, then large rests straight from the socket."""
        filled = 0
        while filled < view.nbytes:
            if self._start == self._end:
                if view.nbytes - filled >= _READ_BYTES:
                    filled += await self._receive_some(view[filled:])
                    continue
                self._start = 0
                self._end = await self._receive_some(memoryview(self._buffer))
            take = min(view.nbytes - filled, self._end - self._start)
            view[filled : filled + take] = self._buffer[self._start : self._start + take]
            self._start += take
            filled += take

    async def _receive_some(self, view: memoryview) -> int:
        count = await self._loop.sock_recv_into(self._sock, view)
        if count == 0:
            raise ConnectionLost("closed by the peer")
        self._last_received_s = self._loop.time()
        return count

    # --- ending ---

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the connection; whatever ends it ends the connection."""
        try:
            await work()
        except (HalfmoonError, OSError) as error:
            if isinstance(error, WireError):
                log.warning("%r: %s", self, error)
            self.close(str(error) or type(error).__name__)
        except Exception:  # (a bug in a handler must end in on_closed, not in silence)
            log.exception("%r: handler failed", self)
            self.close("handler failed")

    def close(self, reason: str = "closed here") -> None:
        """End the connection now. Pending requests and sends fail; calling it twice is allowed."""
        if self.closed:
            return
        self.closed = True
        lost = ConnectionLost(f"{self.peer.kind} {self.peer.name}: {reason}")
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(lost)
                pending.future.exception()  # mark as seen: the waiter may be gone already
        for _, sent in self._outgoing:
            if sent is not None and not sent.done():
                sent.set_exception(lost)
                sent.exception()
        self._outgoing.clear()
        current = asyncio.current_task(self._loop) if self._loop.is_running() else None
        for task in (*self._tasks, *self._request_tasks):
            if task is not current:
                task.cancel()
        # Pending sock_* calls hold the descriptor: shut down now, close when they are cancelled.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._loop.call_soon(self._sock.close)
        # Not from within a `post`: the handler would be entered while it is deciding.
        self._loop.call_soon(self._handler.on_closed, self, reason)

    async def wait_closed(self) -> None:
        """Wait until every task of a closed connection has ended."""
        tasks = [t for t in (*self._tasks, *self._request_tasks) if t is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing() -> None:
    """Be the callback of a reply that needs none."""


def _parts(reply: Reply) -> tuple[Message, Buffers, Callable[[], None]]:
    if not isinstance(reply, tuple):
        return reply, (), _nothing
    body, payload, *done = reply
    return body, payload, done[0] if done else _nothing


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
            peer, keys = await _greet_as_client(sock, identity, secret)
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


# --- handshake ----------------------------------------------------------------------------------


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
        peer, keys = await _greet_as_server(client, identity, secret)
    receives, sends = sets(peer.kind)
    return Connection(client, peer, handler, keys, sends, receives, heartbeat_s)


async def _greet_as_client(
    sock: socket.socket, me: Identity, secret: bytes
) -> tuple[Identity, tuple[bytes, bytes]]:
    nonce = secrets.token_bytes(32)
    await _send_hello(sock, [PROTOCOL_VERSION, me.kind, me.name, me.incarnation, nonce])
    server, theirs, proof = _parse_hello(await _read_hello(sock), with_proof=True)
    transcript = _transcript(me, server, nonce, theirs)
    if not hmac.compare_digest(proof, _prove(secret, b"server", transcript)):
        raise AuthError("the peer does not know the cluster secret")
    await _send_hello(sock, [_prove(secret, b"client", transcript)])
    return server, (_prove(secret, b"c2s", transcript), _prove(secret, b"s2c", transcript))


async def _greet_as_server(
    sock: socket.socket, me: Identity, secret: bytes
) -> tuple[Identity, tuple[bytes, bytes]]:
    client, theirs, _ = _parse_hello(await _read_hello(sock), with_proof=False)
    nonce = secrets.token_bytes(32)
    transcript = _transcript(client, me, theirs, nonce)
    proof = _prove(secret, b"server", transcript)
    await _send_hello(sock, [PROTOCOL_VERSION, me.kind, me.name, me.incarnation, nonce, proof])
    answer = await _read_hello(sock)
    if not (
        len(answer) == 1
        and isinstance(answer[0], bytes)
        and hmac.compare_digest(answer[0], _prove(secret, b"client", transcript))
    ):
        raise AuthError("the peer does not know the cluster secret")
    return client, (_prove(secret, b"s2c", transcript), _prove(secret, b"c2s", transcript))


def _transcript(client: Identity, server: Identity, client_nonce: bytes, nonce: bytes) -> bytes:
    parts = [client.kind, client.name, client.incarnation, client_nonce]
    parts += [server.kind, server.name, server.incarnation, nonce]
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, *parts])
    return packed


def _prove(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return blake2b(transcript, key=secret[:64], person=purpose, digest_size=32).digest()


def _parse_hello(fields: Sequence[object], *, with_proof: bool) -> tuple[Identity, bytes, bytes]:
    if not fields or fields[0] != PROTOCOL_VERSION:
        raise WireError(f"the peer speaks protocol {fields[:1]}, this is {PROTOCOL_VERSION}")
    types = (int, str, str, str, bytes, bytes)[: 6 if with_proof else 5]
    if tuple(type(f) for f in fields) != types:
        raise WireError("malformed greeting")
    kind, name, incarnation, nonce = fields[1:5]
    proof = fields[5] if with_proof else b""
    assert isinstance(kind, str) and isinstance(name, str) and isinstance(incarnation, str)
    assert isinstance(nonce, bytes) and isinstance(proof, bytes)
    return Identity(kind, name, Incarnation(incarnation)), nonce, proof


async def _send_hello(sock: socket.socket, fields: Sequence[object]) -> None:
    body: bytes = msgpack.packb(list(fields))
    await asyncio.get_running_loop().sock_sendall(sock, len(body).to_bytes(2, "little") + body)


async def _read_hello(sock: socket.socket) -> Sequence[object]:
    size = int.from_bytes(await _read_raw(sock, 2), "little")
    if size > _MAX_HELLO_BYTES:
        raise WireError("oversized greeting")
    try:
        fields = msgpack.unpackb(await _read_raw(sock, size))
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"malformed greeting: {error}") from error
    if not isinstance(fields, list):
        raise WireError("malformed greeting")
    return fields


async def _read_raw(sock: socket.socket, num_bytes: int) -> bytes:
    raw = b""
    while len(raw) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(raw))
        if not part:
            raise ConnectionLost("closed during the greeting")
        raw += part
    return raw
