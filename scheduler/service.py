"""The Conductor as a process: its listener, its clock, its term, its event log.

Everything runs in one asyncio loop. A peer registers first; the connection it did so on is its
connection, and the loss of that one is the loss of the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import assert_never

from core.config import ConductorConfig
from core.errors import ConfigError, ConnectionLost, InvariantError, WireError
from core.ids import BLOCK_HASH_BYTES, Address, AttemptId, Incarnation
from core.messages import to_pool
from core.messages.to_conductor import (
    REPLIES,
    AttemptEnded,
    GetClusterState,
    PlaceRequest,
    PoolEvents,
    PoolReport,
    PoolSnapshot,
    PrefillEnded,
    RegisterGateway,
    RegisterPoolNode,
    RegisterWorker,
    WorkerReport,
)
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity, Listener, Reply, listen
from core.wire import Message, MessageSet
from scheduler.conductor import Conductor
from scheduler.event_log import EventLog
from scheduler.events import (
    Admit,
    AttemptReported,
    Disconnect,
    Event,
    GatewayRegistered,
    PeerLost,
    Place,
    PlacementRequested,
    PoolEventsReceived,
    PoolNodeRegistered,
    PoolReported,
    PoolSnapshotReceived,
    PrefillReported,
    Refuse,
    Reject,
    RequestSnapshot,
    Ticked,
    WorkerRegistered,
    WorkerReported,
)

log = logging.getLogger(__name__)

_FROM_WORKER = MessageSet(RegisterWorker, WorkerReport, GetClusterState)
_FROM_POOL = MessageSet(RegisterPoolNode, PoolReport, PoolEvents, PoolSnapshot)
_FROM_GATEWAY = MessageSet(
    RegisterGateway, PlaceRequest, PrefillEnded, AttemptEnded, GetClusterState
)
_TO_POOL = MessageSet(*REPLIES.classes.values(), to_pool.SendSnapshot)

SETS = {
    "prefill": (_FROM_WORKER, REPLIES),
    "decode": (_FROM_WORKER, REPLIES),
    "pool": (_FROM_POOL, _TO_POOL),
    "gateway": (_FROM_GATEWAY, REPLIES),
    "cli": (MessageSet(GetClusterState), REPLIES),
}
"""By the peer's kind: what is received from it and what is sent to it."""


class ConductorService(BaseHandler):
    """Runs one life of the Conductor. `epoch_file` holds the term of the last one."""

    def __init__(
        self,
        config: ConductorConfig,
        *,
        identity: Identity,
        secret: bytes,
        listen: Address,
        epoch_file: Path,
        event_log: Path | None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._config = config
        self._identity, self._secret = identity, secret
        self._listen_at = listen
        self._epoch_file, self._event_log_path = epoch_file, event_log
        self._heartbeat_s = heartbeat_s
        self._connections: dict[Incarnation, Connection] = {}
        self._next_correlation = 0
        self._conductor: Conductor | None = None
        self._event_log: EventLog | None = None
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin a new term and listen. Raises `ConfigError`, `OSError`."""
        epoch = raise_epoch(self._epoch_file)
        self._conductor = Conductor(self._config, epoch)
        if self._event_log_path is not None:
            self._event_log = EventLog(self._event_log_path, self._config, epoch)
        try:
            self._listener = await listen(
                self._listen_at,
                self,
                identity=self._identity,
                secret=self._secret,
                sets=_sets,
                heartbeat_s=self._heartbeat_s,
            )
        except OSError:
            await self.stop()
            raise
        self._ticker = asyncio.create_task(self._tick_forever())

    @property
    def address(self) -> Address:
        """Where it listens, once started."""
        assert self._listener is not None
        assert isinstance(self._listener.endpoint, Address)
        return self._listener.endpoint

    @property
    def conductor(self) -> Conductor:
        """The state machine, once started; for reading."""
        assert self._conductor is not None
        return self._conductor

    async def stop(self) -> None:
        """Close every connection and the log. Calling it twice is allowed."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
        if self._event_log is not None:
            self._event_log.close()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            self._handle(Ticked(self._now_s()))
            if self._event_log is not None:
                self._event_log.flush()

    # --- events in ---

    async def on_request(self, conn: Connection, message: Message) -> Reply:
        """Answer registrations, placement requests and status requests."""
        if conn.closed:
            raise ConnectionLost("closed before the request was looked at")
        now_s, correlation = self._now_s(), self._correlation()
        match message:
            case RegisterWorker(ref=ref):
                self._claim(conn, ref.name, ref.incarnation)
                return self._register(conn, WorkerRegistered(now_s, correlation, message))
            case RegisterPoolNode(ref=ref):
                self._claim(conn, ref.name, ref.incarnation)
                return self._register(conn, PoolNodeRegistered(now_s, correlation, message))
            case RegisterGateway():
                self._claim(conn, message.name, message.incarnation)
                return self._register(conn, GatewayRegistered(now_s, correlation, message))
            case PlaceRequest():
                if self._connections.get(conn.peer.incarnation) is not conn:
                    raise ConnectionLost("a gateway registers before it asks")
                _check_hashes(message.block_hashes)
                _check_owner(conn, message.attempt)
                if message.num_tokens < 1 or message.num_new_tokens < 0:
                    raise WireError("a request has at least one token")
                return self._answer(PlacementRequested(now_s, correlation, message))
            case GetClusterState():
                return self.conductor.state(now_s)
            case _:
                return await super().on_request(conn, message)

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        """Take reports and progress; those of a connection that is not a peer's are ignored."""
        if self._connections.get(conn.peer.incarnation) is not conn:
            return
        now_s, peer = self._now_s(), conn.peer.incarnation
        match message:
            case WorkerReport():
                self._handle(WorkerReported(now_s, peer, message))
            case PoolReport():
                self._handle(PoolReported(now_s, peer, message))
            case PoolEvents():
                _check_hashes(message.added, message.removed)
                self._handle(PoolEventsReceived(now_s, peer, message))
            case PoolSnapshot():
                _check_hashes(message.block_hashes)
                self._handle(PoolSnapshotReceived(now_s, peer, message))
            case PrefillEnded():
                _check_owner(conn, message.attempt)
                self._handle(PrefillReported(now_s, message))
            case AttemptEnded():
                _check_owner(conn, message.attempt)
                self._handle(AttemptReported(now_s, message))
            case _:
                super().on_message(conn, message, payload)

    def on_closed(self, conn: Connection, reason: str) -> None:
        """Turn the loss of a registered peer's connection into an event."""
        if self._connections.get(conn.peer.incarnation) is conn:
            del self._connections[conn.peer.incarnation]
            log.info("lost %s %s: %s", conn.peer.kind, conn.peer.name, reason)
            self._handle(PeerLost(self._now_s(), conn.peer.incarnation))

    def _claim(self, conn: Connection, name: str, incarnation: Incarnation) -> None:
        if (conn.peer.name, conn.peer.incarnation) != (name, incarnation):
            raise WireError(f"{conn.peer.name} registers as {name}")

    # --- actions out ---

    def _register(self, conn: Connection, event: Event) -> Message:
        """Make this the peer's connection, unless it is refused; an older one is closed."""
        reply = self._answer(event)
        older = self._connections.get(conn.peer.incarnation)
        self._connections[conn.peer.incarnation] = conn
        if older is not None and older is not conn:
            older.close("registered again")
        return reply

    def _answer(self, event: Event) -> Message:
        reply = self._handle(event)
        if reply is None:
            raise InvariantError(f"{type(event).__name__} was not answered")
        return reply

    def _handle(self, event: Event) -> Message | None:
        """Let the Conductor handle an event and do what it wants; return its answer, if any."""
        actions = self.conductor.handle(event)
        if self._event_log is not None:
            self._event_log.write(event, actions)
        reply: Message | None = None
        refused: str | None = None
        for action in actions:
            match action:
                case Admit(_, registered):
                    reply = registered
                case Place(_, placement):
                    reply = placement
                case Reject(_, rejection):
                    reply = rejection
                case Refuse(_, reason):
                    refused = reason
                case RequestSnapshot(incarnation):
                    self._request_snapshot(incarnation)
                case Disconnect(incarnation, reason):
                    self._disconnect(incarnation, reason)
                case _:
                    assert_never(action)
        if refused is not None:
            raise ConnectionLost(refused)
        return reply

    def _request_snapshot(self, incarnation: Incarnation) -> None:
        conn = self._connections.get(incarnation)
        if conn is not None:
            # A node that is gone this moment registers again, with a snapshot.
            with contextlib.suppress(ConnectionLost):
                conn.post(to_pool.SendSnapshot())

    def _disconnect(self, incarnation: Incarnation, reason: str) -> None:
        conn = self._connections.pop(incarnation, None)
        if conn is not None:
            log.info("closing %s %s: %s", conn.peer.kind, conn.peer.name, reason)
            conn.close(reason)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _correlation(self) -> int:
        self._next_correlation += 1
        return self._next_correlation


def raise_epoch(path: Path) -> int:
    """Raise the term in `path` by one, on disk before it is used. Raises `ConfigError`, `OSError`.

    A file that is not there is term 0.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = "0"
    if not text.strip().isdecimal():
        raise ConfigError(
            f"{path} does not hold the Conductor's term; write a number into it that is higher "
            f"than every term before, or stop the whole cluster and remove it"
        )
    epoch = int(text) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(f"{epoch}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return epoch


def _sets(kind: str) -> tuple[MessageSet, MessageSet]:
    if kind not in SETS:
        raise WireError(f"a {kind} has no business here")
    return SETS[kind]


def _check_hashes(*joined: bytes) -> None:
    if any(len(raw) % BLOCK_HASH_BYTES for raw in joined):
        raise WireError(f"block hashes take {BLOCK_HASH_BYTES} bytes each")


def _check_owner(conn: Connection, attempt: AttemptId) -> None:
    if attempt.request.gateway != conn.peer.incarnation:
        raise WireError(f"{conn.peer.name} speaks of {attempt}, which is not its own")
