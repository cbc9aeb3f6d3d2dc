"""Connections that a process keeps: one to the Conductor, and one to each peer it talks to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from core.errors import ConnectionLost, HalfmoonError, WireError
from core.ids import Address, Incarnation
from core.messages import to_conductor
from core.messages.to_conductor import Registered
from core.net import HEARTBEAT_S, BaseHandler, Connection, Handler, Identity, dial
from core.wire import Message, MessageSet

log = logging.getLogger(__name__)

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to reach the Conductor; the last one repeats."""


class Peers:
    """At most one outgoing connection to each life of each peer, dialled when first needed."""

    def __init__(
        self,
        handler: Handler,
        *,
        identity: Identity,
        secret: bytes,
        sends: MessageSet,
        receives: MessageSet,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._handler = handler
        self._identity = identity
        self._secret = secret
        self._sends, self._receives = sends, receives
        self._heartbeat_s = heartbeat_s
        self._dialling: dict[Incarnation, asyncio.Task[Connection]] = {}

    async def get(self, address: Address, incarnation: Incarnation) -> Connection:
        """Return the open connection to this life of a peer. Raises `ConnectionLost`, `WireError`.

        Lives that ended are forgotten; a life whose connection broke is dialled anew.
        """
        task = self._dialling.get(incarnation)
        if task is None or (task.done() and self._is_over(task)):
            self._dialling = {k: t for k, t in self._dialling.items() if not self._is_over(t)}
            task = asyncio.create_task(self._dial(address, incarnation))
            self._dialling[incarnation] = task
        return await asyncio.shield(task)

    def opened(self, incarnation: Incarnation) -> Connection | None:
        """Return the connection if it is open at this moment."""
        task = self._dialling.get(incarnation)
        return None if task is None or not task.done() or self._is_over(task) else task.result()

    async def _dial(self, address: Address, incarnation: Incarnation) -> Connection:
        return await dial(
            address,
            self._handler,
            identity=self._identity,
            secret=self._secret,
            sends=self._sends,
            receives=self._receives,
            expect=incarnation,
            heartbeat_s=self._heartbeat_s,
        )

    @staticmethod
    def _is_over(task: asyncio.Task[Connection]) -> bool:
        if not task.done():
            return False
        return task.cancelled() or task.exception() is not None or task.result().closed

    async def close(self) -> None:
        """Close them all."""
        for task in self._dialling.values():
            if not task.done():
                task.cancel()
            elif not self._is_over(task):
                task.result().close()
                await task.result().wait_closed()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)


class ConductorLink:
    """Keeps this process registered with the Conductor, whichever life of it is running.

    `resolve` finds the address (it may have moved), `register` makes the registration message from
    the state of the moment, `on_registered` is told after each registration (a pool node sends its
    snapshot then), `on_message` gets one-way messages. A Conductor of an older term than one seen
    before is refused.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[Address]],
        *,
        identity: Identity,
        secret: bytes,
        register: Callable[[], Message],
        on_registered: Callable[[], None] = lambda: None,
        on_message: Callable[[Message], None] | None = None,
        on_lost: Callable[[], None] = lambda: None,
        receives: MessageSet = to_conductor.REPLIES,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.epoch = 0
        self._resolve = resolve
        self._identity, self._secret = identity, secret
        self._register = register
        self._on_registered, self._on_lost = on_registered, on_lost
        self._handler = _ConductorHandler(on_message)
        self._receives = receives
        self._heartbeat_s = heartbeat_s
        self._conn: Connection | None = None
        self._connected = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the Conductor knows this process at this moment."""
        return self._conn is not None and not self._conn.closed

    async def run(self) -> None:
        """Register and stay registered until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    conn = await self._connect()
                except (HalfmoonError, OSError, TimeoutError) as error:
                    pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                    failures += 1
                    log.info("%s: no Conductor yet: %s", self._identity.name, error)
                    await asyncio.sleep(pause_s)
                    continue
                failures = 0
                self._conn = conn
                self._connected.set()
                self._on_registered()
                await self._handler.lost.wait()
                self._connected.clear()
                self._on_lost()
        finally:
            if self._conn is not None:
                self._conn.close()
                await self._conn.wait_closed()

    async def _connect(self) -> Connection:
        self._handler.lost = asyncio.Event()
        conn = await dial(
            await self._resolve(),
            self._handler,
            identity=self._identity,
            secret=self._secret,
            sends=to_conductor.MESSAGES,
            receives=self._receives,
            heartbeat_s=self._heartbeat_s,
        )
        try:
            reply, _ = await conn.request(self._register(), timeout_s=5)
            if not isinstance(reply, Registered):
                raise WireError(f"expected Registered, got {type(reply).__name__}")
            if reply.epoch < self.epoch:
                raise ConnectionLost(f"Conductor of term {reply.epoch}; {self.epoch} was seen")
        except BaseException:
            conn.close()
            raise
        self.epoch = reply.epoch
        return conn

    def post(self, message: Message) -> bool:
        """Send a one-way message; `False` when there is no Conductor (it is soft state then)."""
        if self._conn is None or self._conn.closed:
            return False
        try:
            self._conn.post(message)
        except ConnectionLost:
            return False
        return True

    async def request(self, message: Message, *, timeout_s: float) -> Message:
        """Ask the Conductor, waiting for one if need be. Raises `TimeoutError`, `HalfmoonError`."""
        async with asyncio.timeout(timeout_s):
            while True:
                await self._connected.wait()
                assert self._conn is not None
                try:
                    reply, _ = await self._conn.request(message, timeout_s=timeout_s)
                except ConnectionLost:
                    await asyncio.sleep(RETRY_S[0])
                    continue
                return reply


class _ConductorHandler(BaseHandler):
    def __init__(self, on_message: Callable[[Message], None] | None) -> None:
        self.lost = asyncio.Event()
        self._on_message = on_message

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        if self._on_message is None:
            super().on_message(conn, message, payload)
        else:
            self._on_message(message)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self.lost.set()
