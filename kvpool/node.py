"""The pool node's shell: sockets, shared memory and threads around `PoolNodeState`.

Start: check the memory, take the name on this host, make the segments, listen (TCP for other
hosts, a Unix socket for local workers, one more to hand out the segments), register with the
Conductor. Slices that arrive are received straight into their slots, blocks are sent straight out
of them; only checksums look at the bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import assert_never

from core import net
from core.config import PoolNodeConfig
from core.errors import ConfigError, ConnectionLost, HalfmoonError, RemoteError, WireError
from core.hashing import join_hashes
from core.ids import Address, Incarnation, PoolRef
from core.links import ConductorLink, Peers
from core.messages import to_pool
from core.messages.to_conductor import LinkSample, Registered
from core.messages.to_pool import (
    BlocksLeased,
    BlocksRead,
    BlockWritten,
    CloseTransfer,
    LeaseBlocks,
    PoolStats,
    ReadBlocks,
    SendSnapshot,
    WriteSlices,
)
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity, UnixEndpoint
from core.transfer_meter import TransferMeter
from core.wire import Message, MessageSet
from kvpool.checksum import pack_checksums, slice_checksum
from kvpool.events import (
    Action,
    BlocksSent,
    BlocksVerified,
    CloseAtSource,
    ConductorRegistered,
    Event,
    LeaseAtSource,
    LinkClosed,
    ReadFromSource,
    Refuse,
    Reply,
    Requested,
    SendBlocks,
    SourceFailed,
    SourceLeased,
    SourceRead,
    Tell,
    TellConductor,
    Ticked,
    Told,
    VerifyBlocks,
)
from kvpool.handover import DescriptorServer, NameLock, descriptor_path, reap_dead, socket_path
from kvpool.memory import (
    Segments,
    allocate,
    check_memory,
    close_all,
    create_segments,
    make_layout,
)
from kvpool.records import SELF, LinkId
from kvpool.state import PoolNodeState

log = logging.getLogger(__name__)

_PEER_KINDS = frozenset({"prefill", "decode", "pool", "conductor", "cli"})
_FROM_CONDUCTOR = MessageSet(Registered, SendSnapshot)
_INLINE_BYTES = 1 << 20
"""Up to here a checksum in the loop costs less than a thread's hand-over."""
_ALLOCATE_BYTES = 16 << 20
_ALLOCATE_SHARE = 0.2
"""Of one core's time: workers load their weights meanwhile."""


class PoolNode:
    """One life of a pool node. `start` once, `stop` once."""

    def __init__(
        self,
        config: PoolNodeConfig,
        *,
        identity: Identity,
        secret: bytes,
        listen: Address,
        socket_dir: Path,
        resolve_conductor: Callable[[], Awaitable[Address]],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Raises `ConfigError` for a configuration that cannot work."""
        self.socket_path = socket_path(socket_dir, identity.name)
        self._config = config
        self._identity = identity
        self._secret = secret
        self._listen = listen
        self._heartbeat_s = heartbeat_s
        self._layout = make_layout(
            config.num_slots, config.slot_bytes, config.num_layers, config.segment_bytes
        )
        self._socket_dir = socket_dir
        self._handler = _PeerHandler(self)
        self._fds: list[int] = []
        self._links: dict[Connection, LinkId] = {}
        self._connections: dict[LinkId, Connection] = {}
        self._numbers = itertools.count(SELF + 1)
        self._answers: dict[int, asyncio.Future[net.Reply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved: dict[Incarnation, tuple[int, float]] = {}
        self._transfers = TransferMeter()
        self._scratch = memoryview(bytearray(self._layout.slice_bytes))
        self._peers = Peers(
            BaseHandler(),
            identity=identity,
            secret=secret,
            sends=to_pool.MESSAGES,
            receives=to_pool.REPLIES,
            heartbeat_s=heartbeat_s,
        )
        self._conductor = ConductorLink(
            resolve_conductor,
            identity=identity,
            secret=secret,
            register=lambda: self._state.registration(),
            on_registered=lambda: self._handle(ConductorRegistered()),
            on_message=lambda message: self._handle(Told(self._now_s(), SELF, message)),
            receives=_FROM_CONDUCTOR,
            heartbeat_s=heartbeat_s,
        )

    # --- life ---

    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` (the message says the fix) or `OSError`."""
        check_memory(self._layout.num_slots * self._layout.slot_bytes)
        self._lock = NameLock(self._socket_dir, self._identity.name)
        try:
            for name in reap_dead(self._socket_dir):
                log.info("removed the socket files of dead pool node %s", name)
            self._fds = create_segments(self._layout)
        except BaseException:
            self._lock.release()
            raise
        try:
            self._segments = Segments(self._layout, self._fds)
            await self._open()
        except BaseException:
            close_all(self._fds)
            self._fds = []
            self._lock.release()
            raise
        for work in (self._conductor.run, self._tick, self._report, self._allocate):
            self._spawn(work())

    async def _open(self) -> None:
        try:
            tcp = await self._listen_at(self._listen)
        except OSError as error:
            raise ConfigError(
                f"pool node {self._identity.name} cannot listen at {self._listen}: "
                f"{error.strerror or error}: choose another address or port 0"
            ) from error
        self._listeners = [tcp]
        try:
            assert isinstance(tcp.endpoint, Address)
            self.ref = PoolRef(self._identity.name, self._identity.incarnation, tcp.endpoint)
            self._state = PoolNodeState(
                self._config, self.ref, generations=self._segments.generations
            )
            self._listeners.append(await self._listen_at(UnixEndpoint(self.socket_path)))
            self._descriptors = DescriptorServer(
                descriptor_path(self.socket_path), self.ref, self._layout, self._fds
            )
        except BaseException:
            for listener in self._listeners:
                await listener.close()
            raise

    async def _listen_at(self, endpoint: net.Endpoint) -> net.Listener:
        return await net.listen(
            endpoint,
            self._handler,
            identity=self._identity,
            secret=self._secret,
            sets=_sets,
            heartbeat_s=self._heartbeat_s,
        )

    async def stop(self) -> None:
        """Close every connection, leave nothing behind. Does nothing when not started."""
        if not self._fds:
            return
        self._descriptors.close()
        for listener in self._listeners:
            await listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()
        self._lock.release()
        self._segments.close()
        close_all(self._fds)
        self._fds = []

    def stats(self) -> PoolStats:
        """Return slots by state and counters since start."""
        return self._state.stats()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("pool node %s: a task failed", self.ref.name, exc_info=task.exception())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.event_interval_s)
            self._handle(Ticked(self._now_s()))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            moved, self._moved = self._moved, {}
            samples = [LinkSample(source, size, took) for source, (size, took) in moved.items()]
            self._conductor.post(self._state.report(samples, self._transfers.totals()))

    async def _allocate(self) -> None:
        """Have all memory there before it is needed; a first touch would stall a transfer."""
        for fd, segment in zip(self._fds, range(self._layout.num_segments), strict=False):
            size = self._layout.segment_slots(segment) * self._layout.slot_bytes
            for start in range(0, size, _ALLOCATE_BYTES):
                part = min(_ALLOCATE_BYTES, size - start)
                began_s = self._now_s()
                working = asyncio.ensure_future(asyncio.to_thread(allocate, fd, start, part))
                try:
                    await asyncio.shield(working)
                except asyncio.CancelledError:
                    # The thread uses the descriptor, which `stop` closes after this.
                    await working
                    raise
                await asyncio.sleep((self._now_s() - began_s) * (1 / _ALLOCATE_SHARE - 1))

    # --- events in ---

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _handle(self, event: Event) -> None:
        for action in self._state.handle(event):
            self._execute(action)

    def link_of(self, conn: Connection) -> LinkId:
        """Return the number of a connection. Raises `ConnectionLost` when it is closed."""
        if conn.closed:
            raise ConnectionLost(f"{conn!r} is closed")
        if conn not in self._links:
            link = LinkId(next(self._numbers))
            self._links[conn] = link
            self._connections[link] = conn
        return self._links[conn]

    def told(self, conn: Connection, message: Message) -> None:
        """Take a one-way message of a peer."""
        self._handle(Told(self._now_s(), self.link_of(conn), message))

    async def asked(self, conn: Connection, message: Message) -> net.Reply:
        """Answer a request of a peer."""
        correlation = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[correlation] = answer
        try:
            self._handle(Requested(self._now_s(), self.link_of(conn), correlation, message))
            reply: net.Reply = await answer
            return reply
        finally:
            del self._answers[correlation]

    def left(self, conn: Connection) -> None:
        """A peer's connection ended."""
        link = self._links.pop(conn, None)
        if link is not None:
            del self._connections[link]
            self._handle(LinkClosed(self._now_s(), link))

    def targets(
        self, conn: Connection, message: Message, payload_bytes: int
    ) -> Sequence[memoryview]:
        """Return where the slices of a message go. Raises `WireError` when they do not fit."""
        if not isinstance(message, WriteSlices):
            raise WireError(f"{type(message).__name__} carries no payload")
        if payload_bytes != len(message.handles) * self._layout.slice_bytes:
            raise WireError(f"{payload_bytes} bytes are not {len(message.handles)} slices")
        indexes = self._state.write_targets(self.link_of(conn), message)
        return [
            self._scratch if i is None else self._segments.slice(i, message.layer) for i in indexes
        ]

    # --- actions out ---

    def _execute(self, action: Action) -> None:
        match action:
            case Reply(_, correlation, message):
                self._resolve(correlation, message)
            case Refuse(_, correlation, reason):
                if (answer := self._answers.get(correlation)) is not None:
                    answer.set_exception(RemoteError("Refused", reason))
            case SendBlocks(_, correlation, read, message, slots):
                payload = [self._segments.slot(i) for i in slots]
                sent = BlocksSent(read)
                self._resolve(correlation, (message, payload, lambda: self._handle(sent)))
            case Tell(link, message):
                self._tell(link, message)
            case TellConductor(message):
                self._conductor.post(message)
            case VerifyBlocks():
                self._verify(action)
            case LeaseAtSource():
                self._spawn(self._lease_at_source(action))
            case ReadFromSource():
                self._spawn(self._read_from_source(action))
            case CloseAtSource(source, attempt):
                conn = self._peers.opened(source.incarnation)
                if conn is not None:
                    _post(conn, CloseTransfer(attempt))
            case _:
                assert_never(action)

    def _resolve(self, correlation: int, reply: net.Reply) -> None:
        answer = self._answers.get(correlation)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _tell(self, link: LinkId, message: Message) -> None:
        if (conn := self._connections.get(link)) is not None:
            _post(conn, message)

    def _verify(self, action: VerifyBlocks) -> None:
        if len(action.blocks) * self._layout.slot_bytes <= _INLINE_BYTES:
            good = self._check(action.blocks)
            # Not from within `handle`: its actions come first.
            asyncio.get_running_loop().call_soon(self._verified, action.verification, good)
        else:
            self._spawn(self._verify_in_thread(action))

    async def _verify_in_thread(self, action: VerifyBlocks) -> None:
        good = await asyncio.to_thread(self._check, action.blocks)
        self._verified(action.verification, good)

    def _verified(self, verification: int, good: tuple[bool, ...]) -> None:
        self._handle(BlocksVerified(self._now_s(), verification, good))

    def _check(self, blocks: Sequence[BlockWritten]) -> tuple[bool, ...]:
        return tuple(
            pack_checksums(
                [slice_checksum(s) for s in self._segments.slices(self._layout.index(b.handle))]
            )
            == b.slice_checksums
            for b in blocks
        )

    # --- other nodes ---

    async def _lease_at_source(self, action: LeaseAtSource) -> None:
        ask = LeaseBlocks(action.attempt, join_hashes(action.block_hashes), action.ttl_s)
        try:
            async with asyncio.timeout(action.timeout_s):
                source = action.source
                conn = await self._peers.get(source.address, source.incarnation)
                reply, _ = await conn.request(ask, timeout_s=action.timeout_s)
            if not isinstance(reply, BlocksLeased):
                raise WireError(f"expected BlocksLeased, got {type(reply).__name__}")
            num_blocks = min(reply.num_blocks, len(action.block_hashes))
        except (HalfmoonError, OSError, TimeoutError) as error:
            self._handle(SourceFailed(self._now_s(), action.fetch, str(error)))
            return
        self._handle(SourceLeased(self._now_s(), action.fetch, num_blocks))

    async def _read_from_source(self, action: ReadFromSource) -> None:
        into = [self._segments.slot(self._layout.index(h)) for h in action.handles]
        ask = ReadBlocks(join_hashes(action.block_hashes))
        began_s = self._now_s()
        try:
            source = action.source
            conn = await self._peers.get(source.address, source.incarnation)
            reply, _ = await conn.request(ask, timeout_s=action.timeout_s, into=into)
            if not isinstance(reply, BlocksRead):
                raise WireError(f"expected BlocksRead, got {type(reply).__name__}")
        except (HalfmoonError, OSError, TimeoutError) as error:
            self._handle(SourceFailed(self._now_s(), action.fetch, str(error)))
            return
        num_bytes, took_s = len(into) * self._layout.slot_bytes, self._now_s() - began_s
        self._transfers.add(source.name, self.ref.name, num_bytes, took_s)
        bytes_before, seconds_before = self._moved.get(source.incarnation, (0, 0.0))
        self._moved[source.incarnation] = (bytes_before + num_bytes, seconds_before + took_s)
        self._handle(SourceRead(self._now_s(), action.fetch, reply.slice_checksums))


class _PeerHandler(BaseHandler):
    """Passes what local workers and other hosts send to the node."""

    def __init__(self, node: PoolNode) -> None:
        self._node = node

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        self._node.told(conn, message)

    async def on_request(self, conn: Connection, message: Message) -> net.Reply:
        return await self._node.asked(conn, message)

    def payload_target(
        self, conn: Connection, message: Message, payload_bytes: int
    ) -> Sequence[memoryview]:
        return self._node.targets(conn, message, payload_bytes)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._node.left(conn)


def _sets(kind: str) -> tuple[MessageSet, MessageSet]:
    if kind not in _PEER_KINDS:
        raise WireError(f"a pool node does not talk to a {kind}")
    return to_pool.MESSAGES, to_pool.REPLIES


def _post(conn: Connection, message: Message) -> None:
    """Send to a peer that may be gone: then everything of it is given back anyway."""
    if not conn.closed:
        try:
            conn.post(message)
        except ConnectionLost:
            return
