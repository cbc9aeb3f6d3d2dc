"""One pool node with local workers and remote writers, over real sockets and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
from pathlib import Path

import pytest

from core.errors import AuthError, ConfigError, ConnectionLost, InvariantError, WireError
from core.ids import Address, Incarnation, SlotHandle
from core.messages.to_pool import (
    AlreadyCommitted,
    BlocksRead,
    ReadBlocks,
    SlotReserved,
    SlotsExhausted,
)
from kvpool import memory
from kvpool.client import PoolClient
from kvpool.handover import descriptor_path
from kvpool.node import PoolNode
from tests.kvpool.harness import (
    CONFIG,
    LAYERS,
    SECRET,
    SLICE_BYTES,
    at_base,
    attempt,
    block_hash,
    check,
    content,
    hashes,
    identity,
    nobody,
    put,
    remote_writer,
    reserve_slots,
    running_node,
    until,
    worker,
    write,
)


async def test_blocks_written_in_place_are_leased_and_read_in_place(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        assert w.client.ref == node.ref
        await put(w, attempt(1), [1, 2, 3, 4])
        owner, commits = await w.commits.get()
        assert owner == attempt(1)
        for block, number in zip(commits, [1, 2, 3, 4], strict=True):
            check(w.client, block, number)
        w.client.close_transfer(attempt(1))

        leased = await w.client.lease(attempt(2), hashes(1, 2, 3, 9, 4), ttl_s=9)
        assert len(leased) == 3  # hits stop at the first gap
        for block, number in zip(leased, [1, 2, 3], strict=True):
            check(w.client, block, number)
        assert node.stats().num_leases == 3
        w.client.release(attempt(2), [leased[0].handle])
        await until(lambda: node.stats().num_leases == 2)
        w.client.close_transfer(attempt(2))
        await until(lambda: at_base(node, num_committed=4))


async def test_remote_slices_land_in_the_slots_and_nobody_sees_them_before_the_commit(tmp_path):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        handles = await reserve_slots(w.client, attempt(1), [1, 2], num_private=1)
        assert await writer.begin(handles) == (True, True, True)
        for layer in (2, 0):
            await writer.write(layer, handles, [content(n)[layer] for n in (1, 2, 3)])
        with pytest.raises(InvariantError, match=r"layers \[0, 2\]"):
            await writer.commit(handles)
        assert await w.client.lease(attempt(2), hashes(1), ttl_s=9) == ()
        await writer.write(1, handles, [content(n)[1] for n in (1, 2, 3)])
        assert await w.client.lease(attempt(2), hashes(1), ttl_s=9) == ()
        assert await writer.commit(handles) == (True, True, True)

        owner, commits = await w.commits.get()
        assert (owner, [b.handle for b in commits]) == (attempt(1), handles)
        for block, number in zip(commits, [1, 2, 3], strict=True):
            check(w.client, block, number)
        assert [b.handle for b in await w.client.lease(attempt(2), hashes(1, 2), ttl_s=9)] == (
            handles[:2]
        )
        w.client.close_transfer(attempt(1))
        w.client.close_transfer(attempt(2))
        await until(lambda: at_base(node, num_committed=2))  # the private block is gone


async def test_reservations_are_repeatable_and_all_or_nothing(tmp_path):
    async with running_node(tmp_path, num_slots=4) as node, worker(node.socket_path) as w:
        await put(w, attempt(1), [1])
        first = await reserve_slots(w.client, attempt(2), [2])
        outcomes = await w.client.reserve(attempt(2), hashes(1, 2, 3, 4, 5), 0, ttl_s=9)
        assert isinstance(outcomes[0], AlreadyCommitted)
        assert outcomes[1] == SlotReserved(first[0])
        assert outcomes[2:] == (SlotsExhausted(),) * 3
        assert len(await reserve_slots(w.client, attempt(2), [3], num_private=1)) == 2
        w.client.close_transfer(attempt(1))
        w.client.close_transfer(attempt(2))
        await until(lambda: at_base(node, num_committed=1))
        # Now only block 1 is in the way, and nobody holds it.
        assert len(await reserve_slots(w.client, attempt(3), [6, 7, 8, 9])) == 4
        assert await w.client.lease(attempt(4), hashes(1), ttl_s=9) == ()


@pytest.mark.parametrize("remote", [False, True])
async def test_wrong_bytes_are_refused_and_the_owner_is_told(tmp_path, remote):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as far,
    ):
        writer = far if remote else w.client.writer()
        handles = await reserve_slots(w.client, attempt(1), [1, 2])
        assert all(await writer.begin(handles))
        await write(writer, handles, [1, 2])
        await until(lambda: bytes(w.client.slot(handles[1])[-64:]) == content(2)[2][-64:])
        w.client.slot(handles[1])[-1] ^= 1
        assert await writer.commit(handles) == (True, False)
        assert (await w.commits.get())[1][0].handle == handles[0]
        assert await w.losses.get() == (attempt(1), (handles[1],))
        assert len(await w.client.lease(attempt(2), hashes(1, 2), ttl_s=9)) == 1
        assert dict(node.stats().counters)["blocks_mismatched"] == 1
        w.client.close_transfer(attempt(1))
        w.client.close_transfer(attempt(2))
        await until(lambda: at_base(node, num_committed=1))


async def test_a_reader_detects_that_its_lease_ran_out(tmp_path):
    """B30: the slot is used for another block while a stopped reader still looks at it."""
    async with running_node(tmp_path, num_slots=2) as node, worker(node.socket_path) as w:
        await put(w, attempt(1), [1, 2])
        w.client.close_transfer(attempt(1))
        leased = await w.client.lease(attempt(2), hashes(1, 2), ttl_s=0.05)
        view = w.client.slot(leased[1].handle)
        check(w.client, leased[1], 2)
        await until(lambda: at_base(node, num_committed=2))
        assert dict(node.stats().counters)["leases_expired"] == 2
        check(w.client, leased[1], 2)  # nobody took the slot yet, so the bytes are still right

        await put(w, attempt(3), [3])
        assert bytes(view[:SLICE_BYTES]) != content(2)[0]  # what the block's checksum would catch
        with pytest.raises(ConnectionLost, match="another use"):
            w.client.slot(leased[1].handle)
        # The first block was not the victim: later blocks of a prefix go before earlier ones.
        check(w.client, leased[0], 1)


async def test_a_lease_call_renews_the_transfer(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        await put(w, attempt(1), [1])
        w.client.close_transfer(attempt(1))
        await w.client.lease(attempt(2), hashes(1), ttl_s=0.3)
        await w.client.lease(attempt(3), hashes(1), ttl_s=0.3)
        await w.client.lease(attempt(2), hashes(1), ttl_s=30)
        await until(lambda: node.stats().num_transfers == 1)
        assert dict(node.stats().counters)["leases_expired"] == 1


async def test_an_aborted_transfer_is_quarantined_until_its_writer_ends(tmp_path):
    """B31: the owner aborts while the writer still writes; nobody may get those slots."""
    async with (
        running_node(tmp_path, num_slots=3) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        handles = await reserve_slots(w.client, attempt(1), [1, 2])
        assert all(await writer.begin(handles))
        await writer.write(0, handles, [content(1)[0], content(2)[0]])
        w.client.close_transfer(attempt(1))
        await until(lambda: node.stats().num_quarantined == 2)
        outcomes = await w.client.reserve(attempt(2), hashes(3, 4), 0, ttl_s=9)
        assert outcomes == (SlotsExhausted(),) * 2

        await writer.write(1, handles, [content(1)[1], content(2)[1]])
        await writer.write(2, handles, [content(1)[2], content(2)[2]])
        assert await writer.commit([handles[0]]) == (False,)
        assert not any(bytes(node._segments.slice(i, 1)) != bytes(SLICE_BYTES) for i in range(3))
        await until(lambda: node.stats().num_quarantined == 1)
        writer.end([handles[1]])
        await until(lambda: at_base(node))
        assert dict(node.stats().counters)["slices_dropped"] == 4
        fresh = await reserve_slots(w.client, attempt(2), [3, 4])
        await put(w, attempt(2), [3, 4])
        assert await writer.begin(handles) == (False, False)  # stale generation
        for handle, number in zip(fresh, [3, 4], strict=True):
            assert bytes(w.client.slot(handle)[:SLICE_BYTES]) == content(number)[0]


def stop_sending_after(writer, num_bytes: int) -> None:
    """Have the link stall in the middle of a payload, as a throttled one does."""
    sock = writer._conn._sock
    left = num_bytes

    class Stalling:
        def sendmsg(self, views):
            nonlocal left
            part = b"".join(views)[:left]
            if not part:
                raise BlockingIOError
            sent = sock.send(part)
            left -= sent
            return sent

        def __getattr__(self, name):
            return getattr(sock, name)

    async def send_all(_sock, view):
        while view:
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError):
                view = view[writer._conn._sock.sendmsg([view]) :]

    class Loop:
        sock_sendall = staticmethod(send_all)

        def __getattr__(self, name):
            return getattr(asyncio.get_running_loop(), name)

    writer._conn._sock, writer._conn._loop = Stalling(), Loop()


async def test_a_payload_under_way_never_reaches_a_reused_slot(tmp_path):
    """B31: the slices are in the middle of the wire when the owner aborts; then the link dies."""
    size = 1 << 20
    async with (
        running_node(
            tmp_path, num_slots=1, slot_bytes=LAYERS * size, segment_bytes=LAYERS * size
        ) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        (handle,) = await reserve_slots(w.client, attempt(1), [1])
        assert await writer.begin([handle]) == (True,)
        view = w.client.slot(handle)
        stop_sending_after(writer, 3 * size // 2)
        layers = memoryview(b"\x01" * size)
        await writer.write(0, [handle], [layers])
        sending = asyncio.create_task(writer.write(1, [handle], [layers]))
        await until(lambda: view[size] == 1)
        assert view[2 * size - 1] == 0  # in the middle
        w.client.close_transfer(attempt(1))
        await until(lambda: node.stats().num_quarantined == 1)
        outcomes = await w.client.reserve(attempt(2), hashes(2), 0, ttl_s=9)
        assert outcomes == (SlotsExhausted(),)
        writer.close()
        with pytest.raises(ConnectionLost):
            await sending
        await until(lambda: at_base(node))
        await reserve_slots(w.client, attempt(2), [2])
        view[:] = bytes(view.nbytes)
        await asyncio.sleep(0.01)
        assert not any(view)


@pytest.mark.slow
async def test_aborts_at_random_moments_of_a_stalling_transfer(tmp_path):
    """B31: the next request needs the very slots; it never finds the late bytes in them."""
    chance = random.Random(31)
    async with running_node(tmp_path, num_slots=2) as node, worker(node.socket_path) as w:
        for turn in range(1, 41):
            late, mine = attempt(turn, 1), attempt(turn, 2)
            numbers = [100 * turn, 100 * turn + 1]
            handles = await reserve_slots(w.client, late, [1000 + turn, 2000 + turn])
            async with remote_writer(node) as writer:
                assert all(await writer.begin(handles))
                stop_sending_after(writer, chance.randrange(1, 2 * LAYERS * SLICE_BYTES))
                writing = asyncio.create_task(write(writer, handles, [7, 8]))
                for _ in range(chance.randrange(20)):
                    await asyncio.sleep(0)
                w.client.close_transfer(late)
                outcomes = await w.client.reserve(mine, hashes(*numbers), 0, ttl_s=9)
                assert outcomes == (SlotsExhausted(),) * 2
                assert node.stats().num_quarantined == 2
                writing.cancel()
            await asyncio.wait([writing])
            await until(lambda: node.stats().num_free == 2)
            fresh = await put(w, mine, numbers)
            while (await w.commits.get())[0] != mine:
                pass
            for handle, number in zip(fresh, numbers, strict=True):
                assert bytes(w.client.slot(handle)) == b"".join(content(number))
            w.client.close_transfer(mine)
            await until(lambda: at_base(node, 2))
            for handle in fresh:
                w.client.report_corrupt(handle)  # an empty node for the next turn
            await until(lambda: at_base(node))


async def test_eight_writers_of_one_key(tmp_path):
    """B33: readers see a miss or the whole block; the copies committed later stay private."""
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        seen = []

        async def write_one(number: int) -> bool:
            (handle,) = await reserve_slots(w.client, attempt(number), [1])
            async with remote_writer(node, f"P{number}") as writer:
                assert await writer.begin([handle]) == (True,)
                await write(writer, [handle], [1])
                return (await writer.commit([handle]))[0]

        async def read() -> None:
            while True:
                for block in await w.client.lease(attempt(99), hashes(1), ttl_s=9):
                    check(w.client, block, 1)
                    seen.append(block.handle)
                w.client.release(attempt(99), seen[-1:])

        reading = asyncio.create_task(read())
        assert all(await asyncio.gather(*(write_one(n) for n in range(1, 9))))
        await until(lambda: seen)
        reading.cancel()
        await asyncio.wait([reading])
        assert len(set(seen)) == 1  # one copy is public
        assert node.stats().num_committed == 8
        for number in range(1, 9):
            w.client.close_transfer(attempt(number))
        w.client.close_transfer(attempt(99))
        await until(lambda: at_base(node, num_committed=1))


async def test_a_killed_writer_leaves_no_zombie(tmp_path):
    """B33: the writer dies between begin and commit; a retry of the same key works."""
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        (handle,) = await reserve_slots(w.client, attempt(1), [1])
        async with remote_writer(node) as writer:
            assert await writer.begin([handle]) == (True,)
            await writer.write(0, [handle], content(1)[:1])
        assert await w.losses.get() == (attempt(1), (handle,))
        await until(lambda: at_base(node))
        await put(w, attempt(1), [1])
        assert len(await w.client.lease(attempt(2), hashes(1), ttl_s=9)) == 1


async def test_a_reservation_nobody_writes_runs_out(tmp_path):
    async with running_node(tmp_path, reserve_ttl_s=0.05) as node, worker(node.socket_path) as w:
        written, idle = await reserve_slots(w.client, attempt(1), [1, 2])
        writer = w.client.writer()
        assert await writer.begin([written]) == (True,)
        assert await w.losses.get() == (attempt(1), (idle,))
        assert node.stats().num_reserved == 1
        writer.close()
        assert await w.losses.get() == (attempt(1), (written,))
        await until(lambda: at_base(node))


async def test_a_lost_owner_gives_everything_back(tmp_path):
    async with running_node(tmp_path) as node:
        async with worker(node.socket_path) as w:
            await put(w, attempt(1), [1, 2])
            await w.client.lease(attempt(2), hashes(1), ttl_s=99)
            await reserve_slots(w.client, attempt(3), [3], num_private=2)
        await until(lambda: at_base(node, num_committed=2))


async def test_what_a_cancelled_request_brings_is_given_back(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        for _ in range(5):
            asking = asyncio.create_task(w.client.reserve(attempt(1), hashes(1), 3, ttl_s=99))
            await asyncio.sleep(0)
            asking.cancel()
            w.client.close_transfer(attempt(1))
        await until(lambda: not w.client._tasks)
        await w.client.lease(attempt(2), hashes(1), ttl_s=9)  # the node has seen all before this
        await until(lambda: at_base(node))


async def test_a_cancelled_begin_leaves_no_writer_behind(tmp_path):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        handles = await reserve_slots(w.client, attempt(1), [1, 2])
        asking = asyncio.create_task(writer.begin(handles))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        w.client.close_transfer(attempt(1))
        await until(lambda: node.stats().num_transfers == 0)
        await until(lambda: at_base(node))


async def test_a_private_block_is_found_by_nobody(tmp_path):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        worker(node.socket_path, "W1") as other,
    ):
        (private,) = await reserve_slots(w.client, attempt(1), [], num_private=1)
        writer = w.client.writer()
        assert await writer.begin([private]) == (True,)
        await write(writer, [private], [5])
        assert await writer.commit([private]) == (True,)
        check(w.client, (await w.commits.get())[1][0], 5)
        conn = other.client._conn
        reply, payload = await conn.request(ReadBlocks(block_hash(5)), timeout_s=5)
        assert (reply, payload) == (BlocksRead(()), None)
        other.client.release(attempt(1), [private])  # not its transfer
        other.client.close_transfer(attempt(1))
        other.client.report_corrupt(private)
        assert await other.client.lease(attempt(1), hashes(5), ttl_s=9) == ()
        assert node.stats().num_committed == 1
        w.client.release(attempt(1), [private])
        await until(lambda: at_base(node))


async def test_a_corrupt_block_is_dropped_after_its_last_reader(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        (handle,) = await put(w, attempt(1), [1])
        w.client.report_corrupt(handle)
        assert await w.client.lease(attempt(2), hashes(1), ttl_s=9) == ()
        assert node.stats().num_evicting == 1
        w.client.close_transfer(attempt(1))
        await until(lambda: at_base(node))


async def test_stale_and_foreign_handles_are_refused(tmp_path):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        (good,) = await reserve_slots(w.client, attempt(1), [1])
        bad = [
            SlotHandle(good.segment, good.slot, Incarnation("0" * 16), good.generation),
            SlotHandle(good.segment, good.slot, good.incarnation, good.generation + 1),
            SlotHandle(99, 0, good.incarnation, 1),
            SlotHandle(0, -1, good.incarnation, 1),
            SlotHandle(2, 2, good.incarnation, 1),  # the last segment is shorter
        ]
        assert await writer.begin([*bad, good]) == (False,) * 5 + (True,)
        for handle in bad[:2]:
            with pytest.raises(ConnectionLost):
                w.client.slot(handle)
        for handle in bad[2:]:
            with pytest.raises(WireError):
                w.client.slot(handle)


@pytest.mark.parametrize("layer", [-1, LAYERS])
async def test_slices_that_do_not_fit_end_the_writer(tmp_path, layer):
    async with (
        running_node(tmp_path) as node,
        worker(node.socket_path) as w,
        remote_writer(node) as writer,
    ):
        (handle,) = await reserve_slots(w.client, attempt(1), [1])
        assert await writer.begin([handle]) == (True,)
        await writer.write(layer, [handle], content(1)[:1])
        assert await w.losses.get() == (attempt(1), (handle,))
        await until(lambda: at_base(node))


async def connect(node, me, secret, on_closed=print) -> PoolClient:
    return await PoolClient.connect(
        node.socket_path,
        identity=me,
        secret=secret,
        on_commits=print,
        on_loss=print,
        on_closed=on_closed,
        timeout_s=5,
    )


async def test_a_local_writer_refuses_what_does_not_fit(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        (handle,) = await reserve_slots(w.client, attempt(1), [1])
        writer = w.client.writer()
        await writer.write(0, [handle], content(1)[:1])  # not begun: dropped
        assert not any(w.client.slot(handle))
        assert await writer.begin([handle]) == (True,)
        for layer, data in ((LAYERS, content(1)[0]), (-1, content(1)[0]), (0, content(1)[0][1:])):
            with pytest.raises(WireError):
                await writer.write(layer, [handle], [data])
        assert not any(w.client.slot(handle))


async def test_who_may_connect(tmp_path):
    async with running_node(tmp_path) as node:
        with pytest.raises(AuthError):
            await connect(node, identity("decode", "X"), b"x" * 32)
        closed = asyncio.get_running_loop().create_future()
        client = await connect(node, identity("gateway", "X"), SECRET, closed.set_result)
        assert await closed == "closed by the peer"
        await client.close()
        modes = {p.name: p.stat().st_mode & 0o777 for p in (*tmp_path.iterdir(), tmp_path)}
        assert modes == {"N0.sock": 0o600, "N0.fds": 0o600, "N0.lock": 0o600, tmp_path.name: 0o700}


async def test_memory_outlives_its_node_as_long_as_somebody_looks(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        (handle,) = await put(w, attempt(1), [1])
        view = w.client.slot(handle)
        await node.stop()
        assert await w.closed == "closed by the peer"
        assert bytes(view[:SLICE_BYTES]) == content(1)[0]
        with pytest.raises(ConnectionLost):
            w.client.slot(handle)
        w.client.close_transfer(attempt(1))  # no error
        w.client.release(attempt(1), [handle])
        with pytest.raises(ConnectionLost):
            await w.client.lease(attempt(2), hashes(1), ttl_s=9)


async def test_a_second_node_of_the_same_name_is_refused(tmp_path):
    async with running_node(tmp_path) as node:
        with pytest.raises(ConfigError, match="already runs"):
            async with running_node(tmp_path):
                pass
        async with running_node(tmp_path, "N1"), worker(node.socket_path) as w:
            await put(w, attempt(1), [1])  # the refused start hurt nothing
    assert not list(tmp_path.iterdir())


async def test_a_taken_port_is_refused_with_the_fix(tmp_path):
    async with running_node(tmp_path, "N0") as node:
        second = PoolNode(
            CONFIG,
            identity=identity("pool", "N1"),
            secret=SECRET,
            listen=node.ref.address,
            socket_dir=tmp_path,
            resolve_conductor=nobody,
        )
        with pytest.raises(ConfigError, match="choose another address or port"):
            await second.start()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["N0.fds", "N0.lock", "N0.sock"]


def make_node(directory: Path) -> PoolNode:
    return PoolNode(
        CONFIG,
        identity=identity("pool", "N0"),
        secret=SECRET,
        listen=Address("127.0.0.1", 0),
        socket_dir=directory,
        resolve_conductor=nobody,
    )


async def test_a_start_that_cannot_hand_out_its_memory_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(sock: Path) -> Path:
        return tmp_path / "missing" / sock.name

    monkeypatch.setattr("kvpool.node.descriptor_path", taken)
    node = make_node(tmp_path)
    with pytest.raises(FileNotFoundError):
        await node.start()
    await node.stop()
    assert not list(tmp_path.iterdir())
    del node
    gc.collect()  # an open socket warns


async def test_a_pool_that_does_not_fit_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"needs \d+ MiB .* make the pool at most \d+ MiB"):
        async with running_node(tmp_path, num_slots=1 << 40, segment_bytes=1 << 50):
            pass
    assert not list(tmp_path.iterdir())


async def test_descriptors_and_files_go_back_to_base(tmp_path):
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:halfmoon-pool")

    gc.collect()  # what earlier tests left to it
    before = descriptors()
    async with running_node(tmp_path) as node:
        for number in range(3):
            async with worker(node.socket_path) as w:
                await put(w, attempt(1), [number])
            del w
    await asyncio.sleep(0)
    del node
    assert (descriptors(), segments()) == (before, 0)
    assert not list(tmp_path.iterdir())
    assert not descriptor_path(tmp_path / "N0.sock").exists()
    assert CONFIG.num_slots * CONFIG.slot_bytes < os.sysconf("SC_PAGE_SIZE") * 100


async def test_a_descriptor_is_closed_after_the_thread_that_uses_it(tmp_path, monkeypatch):
    busy, closed = threading.Event(), threading.Event()
    order = []

    def allocate(fd: int, start: int, num_bytes: int) -> None:
        busy.set()
        closed.wait(0.1)
        order.append("allocated")

    def close_all(fds: list[int]) -> None:
        order.append("closed")
        closed.set()
        memory.close_all(fds)

    monkeypatch.setattr("kvpool.node.allocate", allocate)
    monkeypatch.setattr("kvpool.node.close_all", close_all)
    async with running_node(tmp_path):
        assert await asyncio.to_thread(busy.wait, 10)
    assert order == ["allocated", "closed"]
