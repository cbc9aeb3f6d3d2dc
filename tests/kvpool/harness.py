"""Real pool nodes and clients on loopback, and a Conductor that only listens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from core.config import PoolNodeConfig
from core.errors import ConnectionLost
from core.ids import Address, AttemptId, BlockHash, Incarnation, RequestId, SlotHandle
from core.messages import to_conductor
from core.messages.to_conductor import PoolEvents, PoolReport, PoolSnapshot, Registered
from core.messages.to_pool import LeasedBlock, SendSnapshot, SlotReserved
from core.net import BaseHandler, Connection, Identity, listen
from core.wire import MessageSet
from kvpool.checksum import block_checksum, slice_checksum
from kvpool.client import PoolClient, RemoteSlotWriter, SlotWriter
from kvpool.node import PoolNode

SECRET = b"k" * 32
LAYERS = 3
SLICE_BYTES = 4096
CONFIG = PoolNodeConfig(
    num_slots=8,
    slot_bytes=LAYERS * SLICE_BYTES,
    num_layers=LAYERS,
    segment_bytes=3 * LAYERS * SLICE_BYTES,  # three segments, the last one shorter
    event_interval_s=0.01,
    report_interval_s=0.02,
)
_lives = itertools.count(1)


def identity(kind: str, name: str) -> Identity:
    return Identity(kind, name, Incarnation(f"{next(_lives):016x}"))


def attempt(counter: int, number: int = 1) -> AttemptId:
    return AttemptId(RequestId(Incarnation("f" * 16), counter), number)


def block_hash(number: int) -> BlockHash:
    return BlockHash(blake2b(number.to_bytes(8, "little"), digest_size=32).digest())


def hashes(*numbers: int) -> list[BlockHash]:
    return [block_hash(n) for n in numbers]


def content(number: int, size: int = SLICE_BYTES) -> list[memoryview]:
    """The bytes of a block by layer; no two blocks or layers share them."""
    return [
        memoryview(blake2b(f"{number}/{layer}".encode(), digest_size=64).digest() * (size // 64))
        for layer in range(LAYERS)
    ]


async def nobody() -> Address:
    raise ConnectionLost("no Conductor in this test")


@asynccontextmanager
async def running_node(
    directory: Path, name: str = "N0", config: PoolNodeConfig = CONFIG, conductor=nobody, **changes
) -> AsyncIterator[PoolNode]:
    node = PoolNode(
        replace(config, **changes),
        identity=identity("pool", name),
        secret=SECRET,
        listen=Address("127.0.0.1", 0),
        socket_dir=directory,
        resolve_conductor=conductor,
    )
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@dataclass
class Worker:
    """A client with what it was told."""

    client: PoolClient
    me: Identity
    commits: asyncio.Queue[tuple[AttemptId, tuple[LeasedBlock, ...]]]
    losses: asyncio.Queue[tuple[AttemptId, tuple[SlotHandle, ...]]]
    closed: asyncio.Future[str]


@asynccontextmanager
async def worker(path: Path, name: str = "W0", heartbeat_s: float = 1.0) -> AsyncIterator[Worker]:
    commits: asyncio.Queue[tuple[AttemptId, tuple[LeasedBlock, ...]]] = asyncio.Queue()
    losses: asyncio.Queue[tuple[AttemptId, tuple[SlotHandle, ...]]] = asyncio.Queue()
    closed = asyncio.get_running_loop().create_future()
    me = identity("decode", name)
    client = await PoolClient.connect(
        path,
        identity=me,
        secret=SECRET,
        on_commits=lambda a, b: commits.put_nowait((a, b)),
        on_loss=lambda a, h: losses.put_nowait((a, h)),
        on_closed=closed.set_result,
        timeout_s=5,
        heartbeat_s=heartbeat_s,
    )
    try:
        yield Worker(client, me, commits, losses, closed)
    finally:
        await client.close()


@asynccontextmanager
async def remote_writer(node: PoolNode, name: str = "P0") -> AsyncIterator[RemoteSlotWriter]:
    writer = await RemoteSlotWriter.connect(
        node.ref,
        identity=identity("prefill", name),
        secret=SECRET,
        on_closed=lambda reason: None,
        timeout_s=5,
    )
    try:
        yield writer
    finally:
        writer.close()
        await writer._conn.wait_closed()


async def reserve_slots(
    client: PoolClient, owner: AttemptId, numbers: Sequence[int], num_private: int = 0, ttl_s=30.0
) -> list[SlotHandle]:
    outcomes = await client.reserve(owner, hashes(*numbers), num_private, ttl_s=ttl_s)
    assert all(isinstance(o, SlotReserved) for o in outcomes), outcomes
    return [o.handle for o in outcomes if isinstance(o, SlotReserved)]


async def write(writer: SlotWriter, handles: Sequence[SlotHandle], numbers: Sequence[int]) -> None:
    for layer in range(LAYERS):
        await writer.write(layer, handles, [content(n)[layer] for n in numbers])


async def put(w: Worker, owner: AttemptId, numbers: Sequence[int]) -> list[SlotHandle]:
    """Reserve, write and commit through shared memory."""
    handles = await reserve_slots(w.client, owner, numbers)
    writer = w.client.writer()
    assert all(await writer.begin(handles))
    await write(writer, handles, numbers)
    assert all(await writer.commit(handles))
    return handles


def check(client: PoolClient, block: LeasedBlock, number: int) -> None:
    """Read a block as a worker does, and compare."""
    raw = bytes(client.slot(block.handle))
    slices = [raw[i : i + SLICE_BYTES] for i in range(0, len(raw), SLICE_BYTES)]
    assert slices == content(number)
    assert block_checksum([slice_checksum(s) for s in slices]) == block.checksum


async def until(condition) -> None:
    """Let the loop run until `condition` holds; shorter than the time that heals leaks (30 s)."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.002)


def at_base(node: PoolNode, num_committed: int = 0) -> bool:
    stats = node.stats()
    node._state.table.validate()
    return (
        stats.num_committed == num_committed
        and stats.num_free == stats.num_slots - num_committed
        and stats.num_leases == stats.num_transfers == 0
        and not node._state.table._reads
    )


@dataclass
class FakeConductor(BaseHandler):
    """Registers pool nodes and keeps what they send."""

    snapshots: asyncio.Queue[PoolSnapshot] = field(default_factory=asyncio.Queue)
    events: asyncio.Queue[PoolEvents] = field(default_factory=asyncio.Queue)
    reports: asyncio.Queue[PoolReport] = field(default_factory=asyncio.Queue)
    address: Address = field(default_factory=lambda: Address("", 0))

    def on_message(self, conn, message, payload):
        match message:
            case PoolSnapshot():
                self.snapshots.put_nowait(message)
            case PoolEvents():
                self.events.put_nowait(message)
            case PoolReport():
                self.reports.put_nowait(message)

    async def on_request(self, conn: Connection, message):
        self.node = conn
        self.registration = message
        return Registered(1)

    def ask_snapshot(self) -> None:
        self.node.post(SendSnapshot())

    async def resolve(self) -> Address:
        return self.address


@asynccontextmanager
async def fake_conductor() -> AsyncIterator[FakeConductor]:
    conductor = FakeConductor()
    listener = await listen(
        Address("127.0.0.1", 0),
        conductor,
        identity=identity("conductor", "C"),
        secret=SECRET,
        sets=lambda kind: (to_conductor.MESSAGES, MessageSet(Registered, SendSnapshot)),
    )
    assert isinstance(listener.endpoint, Address)
    conductor.address = listener.endpoint
    try:
        yield conductor
    finally:
        await listener.close()
