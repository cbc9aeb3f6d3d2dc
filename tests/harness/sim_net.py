"""A network inside one virtual loop, with the interface of `core.net` and faults on command.

`SimNet.install` puts `dial` and `listen` of this network in the place of the real ones everywhere.
Every message passes through the real codec, so what cannot go over the wire fails here too. As
TCP does, a connection delivers in order or breaks; delays differ by message and connection.
Extra faults: cut, hang (a stopped process or a dead link), and repetition of one-way messages.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import core.connection
import core.net
from core.errors import AuthError, ConnectionLost, HalfmoonError, RemoteError, WireError
from core.ids import Address, Incarnation
from core.net import Buffers, Endpoint, Handler, Identity, Sets
from core.wire import ErrorReply, Message, MessageSet

SILENCE_S = 3 * core.net.HEARTBEAT_S


@dataclass(slots=True)
class NetFaults:
    """What the network does; may be changed at any time."""

    delay_s: tuple[float, float] = (0.0001, 0.01)
    repeat_probability: float = 0.0
    bytes_per_s: float = 200e6
    hung: set[str] = field(default_factory=set)


class SimConnection:
    """One end of a connection; see `core.net.Connection`."""

    def __init__(
        self, net: SimNet, me: Identity, peer: Identity, handler: Handler, sends: MessageSet,
        receives: MessageSet,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.closed = False
        self._net, self._me, self._handler = net, me, handler
        self._sends, self._receives = sends, receives
        self._other: SimConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
        self._arrives_s = 0.0
        self._pending: dict[int, tuple[asyncio.Future[Any], Sequence[memoryview] | None]] = {}
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = {self._loop.create_task(self._deliver_forever())}

    def __repr__(self) -> str:
        return f"<SimConnection {self._me.name} to {self.peer.name}>"

    # --- the interface of core.net.Connection ---

    def post(self, message: Message) -> None:
        self._transmit("one-way", 0, self._sends.encode(message), ())
        if self._net.chance.random() < self._net.faults.repeat_probability:
            self._transmit("one-way", 0, self._sends.encode(message), ())

    async def send(self, message: Message, payload: Buffers = ()) -> None:
        arrives_s = self._transmit("one-way", 0, self._sends.encode(message), payload)
        await asyncio.sleep(max(0.0, arrives_s - self._loop.time()) / 2)
        if self.closed:
            raise ConnectionLost(f"{self.peer.name} is gone")

    async def request(
        self, message: Message, *, timeout_s: float, into: Sequence[memoryview] | None = None
    ) -> tuple[Message, bytes | None]:
        self._next += 1
        number = self._next
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = (future, into)
        try:
            self._transmit("request", number, self._sends.encode(message), ())
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self._pending.pop(number, None)

    def close(self, reason: str = "closed here") -> None:
        if self.closed:
            return
        self.closed = True
        self._net.connections.discard(self)
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"{self.peer.name}: {reason}"))
                future.exception()
        current = asyncio.current_task(self._loop)
        for task in self._tasks:
            if task is not current:
                task.cancel()
        other = self._other
        if other is not None and not other.closed:
            # A stopped or cut-off peer learns of it only by silence.
            wait_s = SILENCE_S if self._net.is_hung(self, other) else self._net.delay_s()
            self._loop.call_later(wait_s, other.close, "closed by the peer")
        self._loop.call_soon(self._handler.on_closed, self, reason)  # type: ignore[arg-type]

    async def wait_closed(self) -> None:
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- delivery ---

    def _transmit(self, kind: str, number: int, header: bytes, payload: Buffers) -> float:
        other = self._other
        if self.closed or other is None:
            raise ConnectionLost(f"{self.peer.name} is gone")
        raw = b"".join(bytes(memoryview(p).cast("B")) for p in payload)
        travel_s = self._net.delay_s() + len(raw) / self._net.faults.bytes_per_s
        other._arrives_s = max(other._arrives_s, self._loop.time() + travel_s)
        other._inbox.put_nowait((other._arrives_s, (kind, number, header, raw)))
        return other._arrives_s

    async def _deliver_forever(self) -> None:
        try:
            while True:
                arrives_s, frame = await self._inbox.get()
                await asyncio.sleep(max(0.0, arrives_s - self._loop.time()))
                hung_since_s = self._loop.time()
                while self._other is not None and self._net.is_hung(self, self._other):
                    await asyncio.sleep(0.05)
                    if self._loop.time() - hung_since_s > SILENCE_S:
                        raise ConnectionLost("silent for three heartbeats")
                self._deliver(*frame)
        except HalfmoonError as error:
            self.close(str(error))

    def _deliver(self, kind: str, number: int, header: bytes, raw: bytes) -> None:
        message = self._receives.decode(header)
        if kind == "one-way":
            target = self._handler.payload_target(self, message, len(raw)) if raw else None  # type: ignore[arg-type]
            _fill(target, raw)
            payload = raw if raw and target is None else None
            self._handler.on_message(self, message, payload)  # type: ignore[arg-type]
        elif kind == "request":
            task = self._loop.create_task(self._answer(number, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            future, into = self._pending.get(number, (None, None))
            if future is None or future.done():
                return
            _fill(into, raw)
            if isinstance(message, ErrorReply):
                future.set_exception(RemoteError(message.code, message.detail))
            else:
                future.set_result((message, raw if raw and into is None else None))

    async def _answer(self, number: int, message: Message) -> None:
        payload: Buffers = ()
        done: Callable[[], None] = core.connection.no_callback
        body: Message
        try:
            reply = await self._handler.on_request(self, message)  # type: ignore[arg-type]
            body, payload, done = core.connection.reply_parts(reply)
        except HalfmoonError as error:
            body = ErrorReply(type(error).__name__, str(error))
        try:
            if not self.closed:
                arrives_s = self._transmit("reply", number, self._sends.encode(body), payload)
                await asyncio.sleep(max(0.0, arrives_s - self._loop.time()) / 2)
        finally:
            done()


def _fill(target: Sequence[memoryview] | None, raw: bytes) -> None:
    if target is None:
        return
    if sum(v.nbytes for v in target) != len(raw):
        raise WireError(f"a payload of {len(raw)} bytes does not fit where it belongs")
    start = 0
    for view in target:
        view.cast("B")[:] = raw[start : start + view.nbytes]
        start += view.nbytes


@dataclass(slots=True)
class SimListener:
    """See `core.net.Listener`."""

    net: SimNet
    endpoint: Endpoint
    handler: Handler
    identity: Identity
    secret: bytes
    sets: Sets
    connections: set[SimConnection] = field(default_factory=set)

    async def close(self) -> None:
        self.net.listeners.pop(self.endpoint, None)
        for conn in list(self.connections):
            conn.close("shutting down")
            await conn.wait_closed()


class SimNet:
    """All listeners and connections of a simulated cluster."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.faults = NetFaults()
        self.listeners: dict[Endpoint, SimListener] = {}
        self.connections: set[SimConnection] = set()
        self._next_port = 1000

    def delay_s(self) -> float:
        """A delay for one message."""
        return self.chance.uniform(*self.faults.delay_s)

    def is_hung(self, one: SimConnection, other: SimConnection) -> bool:
        """Whether either end is stopped."""
        return bool({one._me.name, other._me.name} & self.faults.hung)

    def cut(self, name: str) -> None:
        """Break every connection of a process, as its death does."""
        for conn in list(self.connections):
            if name in (conn._me.name, conn.peer.name):
                conn.close("reset by the peer")

    async def listen(
        self, endpoint: Endpoint, handler: Handler, *, identity: Identity, secret: bytes,
        sets: Sets, heartbeat_s: float = 1.0,
    ) -> SimListener:  # fmt: skip
        """See `core.net.listen`."""
        if isinstance(endpoint, Address) and endpoint.port == 0:
            endpoint = Address(endpoint.host, self._next_port)
            self._next_port += 1
        if endpoint in self.listeners:
            raise OSError(98, "address in use")
        listener = SimListener(self, endpoint, handler, identity, secret, sets)
        self.listeners[endpoint] = listener
        return listener

    async def dial(
        self, endpoint: Endpoint, handler: Handler, *, identity: Identity, secret: bytes,
        sends: MessageSet, receives: MessageSet, expect: Incarnation | None = None,
        timeout_s: float = 5.0, heartbeat_s: float = 1.0,
    ) -> SimConnection:  # fmt: skip
        """See `core.net.dial`."""
        await asyncio.sleep(self.delay_s())
        listener = self.listeners.get(endpoint)
        if listener is None:
            raise ConnectionLost(f"{endpoint}: connection refused")
        if {identity.name, listener.identity.name} & self.faults.hung:
            await asyncio.sleep(timeout_s)
            raise ConnectionLost(f"{endpoint}: timed out")
        if listener.secret != secret:
            raise AuthError("the peer does not know the cluster secret")
        if expect is not None and listener.identity.incarnation != expect:
            raise ConnectionLost(f"{listener.identity.name} is another incarnation now")
        theirs_receive, theirs_send = listener.sets(identity.kind)
        client = SimConnection(self, identity, listener.identity, handler, sends, receives)
        server = SimConnection(
            self, listener.identity, identity, listener.handler, theirs_send, theirs_receive
        )
        client._other, server._other = server, client
        listener.connections = {c for c in listener.connections if not c.closed} | {server}
        self.connections |= {client, server}
        return client

    def install(self, monkeypatch: Any) -> None:
        """Replace `core.net.dial` and `listen` in every module that imported them."""
        for real, fake in ((core.net.dial, self.dial), (core.net.listen, self.listen)):
            for module in list(sys.modules.values()):
                for name, value in list(getattr(module, "__dict__", {}).items()):
                    if value is real:
                        monkeypatch.setattr(module, name, fake)
