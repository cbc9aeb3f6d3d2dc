"""One authenticated connection: framed messages both ways, raw payloads beside them.

One asyncio loop owns a connection; nothing here is thread-safe. After the greeting:

1. Frames go both ways, each with MACs over a session key and a counter. One-way messages are
   handled in order; requests run as tasks, at most `MAX_CONCURRENT_REQUESTS` at a time, and are
   answered by correlation id.
2. Pings when idle. Silence of three heartbeats, a broken socket, a wrong frame, or a peer that
   does not drain its queue ends it: every pending request fails with `ConnectionLost`, and the
   handler is told once.

Payloads are received straight into the memory that `payload_target` names, and sent from the
caller's buffers without a copy; the buffers must stay unchanged until `send` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import ConnectionLost, HalfmoonError, RemoteError, WireError
from core.greeting import Identity
from core.wire import (
    PRELUDE_BYTES,
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
MAX_CONCURRENT_REQUESTS = 64
MAX_QUEUED_BYTES = 64 << 20
_READ_BYTES = 64 << 10

Buffers = Sequence[memoryview | bytes]
Reply = Message | tuple[Message, Buffers] | tuple[Message, Buffers, Callable[[], None]]
"""An answer, its payload, and who is told when the payload's memory is no longer needed."""


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
            raw = await self._read_bytes(PRELUDE_BYTES)
            prelude = parse_prelude(self._receive_key, self._receive_counter, raw)
            header = await self._read_bytes(prelude.header_bytes)
            verify(prelude, header)
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
        done: Callable[[], None] = no_callback
        try:
            reply = await self._handler.on_request(self, message)
            body, payload, done = reply_parts(reply)
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


def no_callback() -> None:
    """Be the callback of a reply that needs none."""


def reply_parts(reply: Reply) -> tuple[Message, Buffers, Callable[[], None]]:
    """Return an answer's message, payload and callback, where it has them."""
    if not isinstance(reply, tuple):
        return reply, (), no_callback
    body, payload, *done = reply
    return body, payload, done[0] if done else no_callback
