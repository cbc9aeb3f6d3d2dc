"""Two pool nodes: fetching, a source that stops in the middle, a Conductor, a killed process."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConnectionLost
from core.hashing import join_hashes
from core.ids import Address, Incarnation
from core.messages.to_conductor import RegisterPoolNode
from core.messages.to_pool import Tier
from kvpool import fetching
from tests.kvpool.harness import (
    CONFIG,
    at_base,
    attempt,
    block_hash,
    check,
    content,
    fake_conductor,
    hashes,
    put,
    running_node,
    until,
    worker,
)


@pytest.fixture
def two_blocks_a_batch(monkeypatch):
    monkeypatch.setattr(fetching, "BATCH_BYTES", 2 * CONFIG.slot_bytes)


@pytest.fixture
async def pair(tmp_path):
    """A source that holds blocks 1 to 5, and a node that holds block 3."""
    async with (
        running_node(tmp_path, "N0") as source,
        running_node(tmp_path, "N1") as node,
        worker(source.socket_path, "P0") as near,
        worker(node.socket_path, "D0") as w,
    ):
        await put(near, attempt(1), [1, 2, 3, 4, 5])
        near.client.close_transfer(attempt(1))
        await put(w, attempt(1), [3])
        w.client.close_transfer(attempt(1))
        await until(lambda: at_base(source, 5) and at_base(node, 1))
        yield source, node, w


async def test_a_fetch_brings_what_is_missing(pair, two_blocks_a_batch):
    source, node, w = pair
    blocks = await w.client.fetch(
        attempt(2), source.ref, hashes(1, 2, 3, 4, 5, 9), ttl_s=9, deadline_s=5
    )
    assert len(blocks) == 5
    for block, number in zip(blocks, [1, 2, 3, 4, 5], strict=True):
        check(w.client, block, number)
    assert dict(node.stats().counters)["blocks_fetched"] == 4
    assert node.stats().num_leases == 5
    w.client.close_transfer(attempt(2))
    await until(lambda: at_base(source, 5) and at_base(node, 5))
    assert w.commits.qsize() == 1  # the fetch was told by its reply alone


async def test_concurrent_fetches_of_one_block_do_not_disturb_each_other(pair):
    source, node, w = pair
    fetches = await asyncio.gather(
        *(
            w.client.fetch(attempt(n), source.ref, hashes(1, 2), ttl_s=9, deadline_s=5)
            for n in (2, 3, 4)
        )
    )
    assert len(set(fetches)) == 1  # one copy stays, leased by all
    for block, number in zip(fetches[0], [1, 2], strict=True):
        check(w.client, block, number)
    assert node.stats().num_committed == 3
    for n in (2, 3, 4):
        w.client.close_transfer(attempt(n))
    await until(lambda: at_base(source, 5) and at_base(node, 3))


async def test_a_fetch_into_a_full_node_brings_what_fits(tmp_path):
    async with (
        running_node(tmp_path, "N0") as source,
        running_node(tmp_path, "N1", num_slots=2) as node,
        worker(source.socket_path, "P0") as near,
        worker(node.socket_path, "D0") as w,
    ):
        await put(near, attempt(1), [1, 2, 3])
        await put(w, attempt(1), [7])
        assert await w.client.fetch(
            attempt(2), source.ref, hashes(1, 2, 3), ttl_s=9, deadline_s=5
        ) == ()  # fmt: skip
        w.client.close_transfer(attempt(2))
        await until(lambda: node.stats().num_reserved == 0)


async def test_a_source_that_is_gone_costs_a_miss(pair):
    source, node, w = pair
    other_life = replace(source.ref, incarnation=Incarnation("e" * 16))
    nobody = replace(source.ref, address=Address("127.0.0.1", 1), incarnation=Incarnation("d" * 16))
    for ref in (other_life, nobody):
        assert len(await w.client.fetch(attempt(2), ref, hashes(3, 4), ttl_s=9, deadline_s=2)) == 1
    assert dict(node.stats().counters)["fetches_failed"] == 2
    w.client.close_transfer(attempt(2))
    await until(lambda: at_base(node, 1))


async def test_wrong_bytes_at_the_source_are_not_taken(pair, two_blocks_a_batch):
    source, node, w = pair
    index = source._state.table._index.by_hash()[block_hash(2)]
    source._segments.slot(index)[5] ^= 1
    blocks = await w.client.fetch(attempt(2), source.ref, hashes(1, 2), ttl_s=9, deadline_s=5)
    assert len(blocks) == 1
    assert dict(node.stats().counters)["blocks_mismatched"] == 1
    w.client.close_transfer(attempt(2))
    await until(lambda: at_base(source, 5) and at_base(node, 2))


def stall(source, after_bytes: int) -> asyncio.Event:
    """Have the source stop sending in the middle of its next block payload."""
    stalled = asyncio.Event()
    conn = next(c for c in source._links if c.peer.kind == "pool")
    sock = conn._sock

    class Stalling:
        def sendmsg(self, views):
            data = b"".join(views)
            if len(data) < after_bytes or stalled.is_set():
                return sock.send(data)
            stalled.set()
            sock.send(data[:after_bytes])
            raise BlockingIOError  # it says nothing of what it sent, and sends no more

        def __getattr__(self, name):
            return getattr(sock, name)

    conn._sock = Stalling()
    conn._tasks[1].cancel()
    return stalled


@pytest.mark.parametrize("how", ["deadline", "close", "leave", "die"])
async def test_a_source_that_stops_in_the_middle(pair, how):
    """Nobody gets a part of a block, and the slots are free again in the end."""
    source, node, w = pair
    await w.client.fetch(attempt(2), source.ref, hashes(1), ttl_s=9, deadline_s=5)  # connects
    w.client.close_transfer(attempt(2))
    stalled = stall(source, CONFIG.slot_bytes)
    deadline_s = 0.2 if how == "deadline" else 60
    fetching_task = asyncio.create_task(
        w.client.fetch(attempt(3), source.ref, hashes(1, 2, 4), ttl_s=9, deadline_s=deadline_s)
    )
    await stalled.wait()
    assert node.stats().num_reserved == 2
    assert await w.client.lease(attempt(4), hashes(2), ttl_s=9) == ()
    match how:
        case "close":
            w.client.close_transfer(attempt(3))
            await until(lambda: node.stats().num_quarantined == 2)
            await source.stop()
            assert await fetching_task == ()
        case "leave":
            await w.client.close()
            await until(lambda: node.stats().num_quarantined == 2)
            with pytest.raises((ConnectionLost, asyncio.CancelledError)):
                await fetching_task
            await source.stop()
        case "die":
            await source.stop()
            assert len(await fetching_task) == 1
        case "deadline":
            assert len(await fetching_task) == 1
    w.client.close_transfer(attempt(3))
    await until(lambda: at_base(node, 2))


async def test_the_conductor_hears_of_every_block(tmp_path):
    async with (
        fake_conductor() as conductor,
        running_node(tmp_path, conductor=conductor.resolve) as node,
        worker(node.socket_path) as w,
    ):
        first = await conductor.snapshots.get()
        assert (first.seq, first.block_hashes, first.last) == (0, b"", True)
        assert conductor.registration == RegisterPoolNode(node.ref, 8, CONFIG.slot_bytes)
        (handle, _) = await put(w, attempt(1), [1, 2])
        batch = await conductor.events.get()
        assert (batch.seq, batch.tier, batch.removed) == (1, Tier.DRAM, b"")
        assert batch.added == join_hashes(sorted(hashes(1, 2)))
        w.client.report_corrupt(handle)
        batch = await conductor.events.get()
        assert (batch.seq, batch.added, batch.removed) == (2, b"", block_hash(1))
        conductor.ask_snapshot()
        snapshot = await conductor.snapshots.get()
        assert (snapshot.seq, snapshot.block_hashes) == (2, block_hash(2))

        conductor.node.close()  # a new connection means a new snapshot
        assert (await conductor.snapshots.get()).block_hashes == block_hash(2)
        while (report := await conductor.reports.get()).num_committed != 1:
            pass
        assert (report.num_free, report.num_leases, report.links) == (6, 2, ())


async def test_the_report_tells_what_the_links_gave(tmp_path):
    async with (
        fake_conductor() as conductor,
        running_node(tmp_path, "N0") as source,
        running_node(tmp_path, "N1", conductor=conductor.resolve) as node,
        worker(source.socket_path, "P0") as near,
        worker(node.socket_path, "D0") as w,
    ):
        await put(near, attempt(1), [1, 2])
        await w.client.fetch(attempt(1), source.ref, hashes(1, 2), ttl_s=9, deadline_s=5)
        while not (report := await conductor.reports.get()).links:
            pass
        (sample,) = report.links
        assert sample.source == source.ref.incarnation
        assert sample.num_bytes == 2 * CONFIG.slot_bytes
        assert sample.seconds > 0


NODE_PROCESS = """
import asyncio, sys
from pathlib import Path
from core.ids import Address
from tests.kvpool.harness import running_node

async def main():
    async with running_node(Path(sys.argv[1])) as node:
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_node_leaves_nothing_that_hinders_the_next(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE_PROCESS, str(tmp_path),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        async with worker(tmp_path / "N0.sock") as w:
            (handle,) = await put(w, attempt(1), [1])
            view = w.client.slot(handle)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            assert "closed by the peer" in await w.closed
            assert bytes(view[:64]) == content(1)[0][:64]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not [p for p in Path("/dev/shm").iterdir() if "halfmoon" in p.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["N0.fds", "N0.lock", "N0.sock"]
    async with running_node(tmp_path, "N1"):  # another node's start reaps them
        assert sorted(p.name for p in tmp_path.iterdir()) == ["N1.fds", "N1.lock", "N1.sock"]
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        with pytest.raises(ConnectionLost):
            w.client.slot(handle)
        assert await w.client.lease(attempt(1), hashes(1), ttl_s=9) == ()
    assert not list(tmp_path.iterdir())
