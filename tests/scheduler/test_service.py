"""The Conductor's process over real sockets, with workers, pool nodes and gateways of straw."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.config import ConductorConfig
from core.errors import ConfigError, ConnectionLost, RemoteError
from core.ids import Address, BlockHash, Incarnation
from core.links import ConductorLink
from core.messages import to_conductor, to_pool
from core.messages.to_conductor import (
    AttemptEnded,
    ClusterState,
    GetClusterState,
    Placement,
    PoolEvents,
    PoolSnapshot,
    PrefillEnded,
    Registered,
    RegisterGateway,
    RegisterPoolNode,
    RegisterWorker,
    Rejection,
    WorkerCapacity,
    WorkerRole,
)
from core.messages.to_pool import Tier
from core.net import BaseHandler, Connection, Identity, dial
from core.wire import Message, MessageSet
from scheduler.event_log import replay_file
from scheduler.service import ConductorService, raise_epoch
from tests.scheduler.cases import (
    GATEWAY,
    IDLE,
    MS_PER_TOKEN,
    attempt,
    hashes,
    place_request,
    pool_ref,
    worker_ref,
)

SECRET = b"s" * 32
ANYWHERE = Address("127.0.0.1", 0)
POOL_HEARS = MessageSet(*to_conductor.REPLIES.classes.values(), to_pool.SendSnapshot)


class Peer(BaseHandler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_message(self, conn, message, payload):
        self.told.put_nowait(message)

    def on_closed(self, conn, reason):
        self.closed.set_result(reason)


class Scene:
    """A running Conductor and the connections opened to it."""

    def __init__(self, tmp_path: Path, **config) -> None:
        self.log = tmp_path / "events.jsonl"
        self.epoch_file = tmp_path / "epoch"
        self.connections: list[Connection] = []
        defaults = {"block_size": 10, "block_bytes": 1000, "report_interval_s": 0.02}
        self.config = ConductorConfig(**{**defaults, **config})
        self.service = self.make_service(ANYWHERE)

    def make_service(self, listen: Address) -> ConductorService:
        return ConductorService(
            self.config,
            identity=Identity("conductor", "conductor", Incarnation("conductor-1")),
            secret=SECRET,
            listen=listen,
            epoch_file=self.epoch_file,
            event_log=self.log,
        )

    async def dial(self, kind: str, name: str, incarnation: Incarnation) -> tuple[Connection, Peer]:
        peer = Peer()
        conn = await dial(
            self.service.address,
            peer,
            identity=Identity(kind, name, incarnation),
            secret=SECRET,
            sends=to_conductor.MESSAGES,
            receives=POOL_HEARS,
        )
        self.connections.append(conn)
        return conn, peer

    async def worker(self, name: str, kind: str = "prefill", life: int = 1):
        ref = worker_ref(name, pool_ref("pool-0"), life)
        conn, peer = await self.dial(kind, name, ref.incarnation)
        assert await ask(conn, register_worker(name, kind, life)) == Registered(1)
        return conn, peer

    async def pool(self, name: str = "pool-0", life: int = 1):
        ref = pool_ref(name, life)
        conn, peer = await self.dial("pool", name, ref.incarnation)
        assert await ask(conn, RegisterPoolNode(ref, 100, 1000)) == Registered(1)
        conn.post(PoolSnapshot(0, Tier.DRAM, b"", last=True))
        return conn, peer

    async def gateway(self):
        conn, peer = await self.dial("gateway", "gateway", GATEWAY)
        register = RegisterGateway("gateway", GATEWAY, ANYWHERE)
        assert await ask(conn, register) == Registered(1)
        return conn, peer

    async def state(self) -> ClusterState:
        conn, _ = await self.dial("cli", "cli", Incarnation("cli-1"))
        state = await ask(conn, GetClusterState())
        conn.close()
        assert isinstance(state, ClusterState)
        return state

    async def until(self, predicate) -> None:
        """Wait for what the Conductor's loop has yet to read from its sockets."""
        async with asyncio.timeout(10):
            while not predicate(self.service.conductor):
                await asyncio.sleep(0.002)


def register_worker(name: str, kind: str, life: int = 1) -> RegisterWorker:
    ref = worker_ref(name, pool_ref("pool-0"), life)
    return RegisterWorker(WorkerRole(kind), ref, WorkerCapacity(100, 10, 8, 512), (), MS_PER_TOKEN)


async def ask(conn: Connection, message: Message) -> Message:
    reply, _ = await conn.request(message, timeout_s=10)
    return reply


@contextlib.asynccontextmanager
async def scene(tmp_path: Path, **config) -> AsyncIterator[Scene]:
    made = Scene(tmp_path, **config)
    await made.service.start()
    try:
        yield made
    finally:
        await made.service.stop()
        for conn in made.connections:
            conn.close()
            await conn.wait_closed()
        assert replay_file(made.log).mismatch is None


async def test_a_request_from_registration_to_its_end(tmp_path):
    async with scene(tmp_path) as made:
        pool, _ = await made.pool()
        await made.worker("p")
        await made.worker("d", "decode")
        gateway, _ = await made.gateway()
        blocks = hashes(4)
        pool.post(PoolEvents(1, Tier.DRAM, b"".join(blocks), b""))
        await made.until(lambda c: c.directory.num_blocks == 4)

        placement = await ask(gateway, place_request(1, 55, blocks=blocks))
        assert isinstance(placement, Placement)
        assert placement.prefill is not None
        assert placement.decode is not None
        assert (placement.prefill.name, placement.decode.name) == ("p", "d")
        assert [(s.pool.name, s.first, s.count) for s in placement.sources] == [("pool-0", 0, 4)]
        state = await made.state()
        assert {row.name: row.num_assigned for row in state.workers} == {
            "p": 1,
            "d": 1,
            "pool-0": 0,
        }
        assert (state.num_placed, state.num_indexed_blocks, state.epoch) == (1, 4, 1)

        gateway.post(PrefillEnded(attempt(1), 15, 40, 0.0, 0.02))
        gateway.post(AttemptEnded(attempt(1), 5))
        await made.until(lambda c: not c.view.assignments)


async def test_nobody_there_is_answered_at_once(tmp_path):
    async with scene(tmp_path) as made:
        gateway, _ = await made.gateway()
        answer = await ask(gateway, place_request(1, 55))
        assert isinstance(answer, Rejection)
        assert not answer.overloaded


async def test_the_end_of_a_connection_is_the_loss_of_its_peer(tmp_path):
    async with scene(tmp_path, worker_timeout_s=1000.0) as made:
        worker, _ = await made.worker("p")
        assert len((await made.state()).workers) == 1
        worker.close()
        await made.until(lambda c: not c.view.workers)


async def test_silence_is_a_loss_and_closes_the_connection(tmp_path):
    async with scene(tmp_path, worker_timeout_s=0.2) as made:
        _, silent = await made.worker("silent")
        talking, _ = await made.worker("talking")
        while not silent.closed.done():
            talking.post(IDLE)
            await asyncio.sleep(0.01)
        assert [w.ref.name for w in made.service.conductor.view.workers.values()] == ["talking"]


async def test_a_second_connection_of_one_life_replaces_the_first_without_a_loss(tmp_path):
    async with scene(tmp_path) as made:
        _, first = await made.worker("p")
        second, _ = await made.worker("p")
        assert await first.closed == "closed by the peer"
        second.post(IDLE)
        await made.until(lambda c: [w.report for w in c.view.workers.values()] == [IDLE])


async def test_a_new_life_ends_the_old_one_which_is_refused(tmp_path):
    async with scene(tmp_path) as made:
        _, old = await made.worker("p")
        await made.worker("p", life=2)
        assert await old.closed == "closed by the peer"
        again, _ = await made.dial("prefill", "p", Incarnation("p-1"))
        with pytest.raises(RemoteError, match="p is now p-2"):
            await ask(again, register_worker("p", "prefill"))
        (row,) = (await made.state()).workers
        assert (row.incarnation, row.restarts) == ("p-2", 1)


async def test_a_gap_asks_the_pool_node_for_a_snapshot(tmp_path):
    async with scene(tmp_path) as made:
        conn, pool = await made.pool()
        conn.post(PoolEvents(2, Tier.DRAM, b"".join(hashes(1)), b""))
        assert await pool.told.get() == to_pool.SendSnapshot()
        conn.post(PoolSnapshot(2, Tier.DRAM, b"".join(hashes(3)), last=True))
        await made.until(lambda c: c.directory.num_blocks == 3)
        assert (await made.state()).num_directory_gaps == 1


async def test_a_restart_raises_the_epoch_and_links_register_again(tmp_path):
    async with scene(tmp_path) as made:
        address: Address = made.service.address

        async def resolve() -> Address:
            return address

        link = ConductorLink(
            resolve,
            identity=Identity("prefill", "p", Incarnation("p-1")),
            secret=SECRET,
            register=lambda: register_worker("p", "prefill"),
        )
        running = asyncio.create_task(link.run())
        try:
            await made.until(lambda c: len(c.view.workers) == 1)
            await made.service.stop()
            made.service = made.make_service(address)
            await made.service.start()
            await made.until(lambda c: len(c.view.workers) == 1)
            assert made.service.conductor.epoch == 2
            async with asyncio.timeout(10):
                while link.epoch != 2:
                    await asyncio.sleep(0.002)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await made.service.stop()
        assert replay_file(made.log).num_sections == 2


async def test_peers_speak_for_themselves_only(tmp_path):
    async with scene(tmp_path) as made:
        conn, _ = await made.dial("prefill", "p", Incarnation("p-9"))
        with pytest.raises(RemoteError, match="registers as"):
            await ask(conn, register_worker("p", "prefill"))
        gateway, peer = await made.gateway()
        foreign = place_request(1, 55, gateway=Incarnation("gateway-2"))
        with pytest.raises(RemoteError, match="not its own"):
            await ask(gateway, foreign)
        gateway.post(AttemptEnded(foreign.attempt, 0))
        assert await peer.closed == "closed by the peer"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gateway", IDLE),
        ("pool", place_request(1, 55)),
        ("cli", RegisterGateway("cli", Incarnation("cli-1"), ANYWHERE)),
        ("stranger", GetClusterState()),
    ],
)
async def test_each_kind_of_peer_has_its_own_messages(tmp_path, caplog, kind, message):
    async with scene(tmp_path) as made:
        conn, _ = await made.dial(kind, kind, Incarnation(f"{kind}-1"))
        with pytest.raises(ConnectionLost):
            await ask(conn, message)
        assert made.service.conductor.num_placed == 0
        assert ("no business here" if kind == "stranger" else "unknown message") in caplog.text


async def test_malformed_requests_are_refused_and_hurt_nobody(tmp_path):
    async with scene(tmp_path) as made:
        gateway, _ = await made.gateway()
        for wrong in (
            place_request(1, 55, blocks=[BlockHash(b"short")]),
            place_request(1, 0),
            place_request(1, 5, num_new_tokens=-1),
        ):
            with pytest.raises(RemoteError):
                await ask(gateway, wrong)
        assert isinstance(await ask(gateway, place_request(1, 55)), Rejection)


async def test_what_an_unregistered_connection_says_is_ignored(tmp_path):
    async with scene(tmp_path) as made:
        await made.worker("p")
        stranger, _ = await made.dial("gateway", "g", GATEWAY)
        with pytest.raises(RemoteError, match="registers before it asks"):
            await ask(stranger, place_request(1, 55))
        conn, _ = await made.dial("prefill", "p", Incarnation("p-1"))
        conn.post(IDLE)
        assert isinstance(await ask(conn, GetClusterState()), ClusterState)
        assert [w.report for w in made.service.conductor.view.workers.values()] == [None]


async def test_a_taken_port_is_an_error_and_leaves_nothing_open(tmp_path):
    async with scene(tmp_path) as made:
        other = made.make_service(made.service.address)
        other._event_log_path = tmp_path / "other.jsonl"
        with pytest.raises(OSError, match="in use"):
            await other.start()


def test_the_epoch_rises_at_each_start_and_survives(tmp_path):
    path = tmp_path / "state" / "epoch"
    assert [raise_epoch(path) for _ in range(3)] == [1, 2, 3]
    assert path.read_text() == "3\n"
    assert [p.name for p in path.parent.iterdir()] == ["epoch"]


@pytest.mark.parametrize("text", ["", "x", "-1"])
def test_a_damaged_epoch_file_is_refused_with_the_fix(tmp_path, text):
    path = tmp_path / "epoch"
    path.write_text(text)
    with pytest.raises(ConfigError, match="higher than every term"):
        raise_epoch(path)
