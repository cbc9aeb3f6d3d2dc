"""KV on its way: stopped readers, aborts, wires that misbehave (B30, B31)."""

from __future__ import annotations

import asyncio
import functools

import pytest

import decode.pool_link
from tests.harness.fault_proxy import FaultProxy
from tests.harness.local_cluster import LocalCluster, Shape, running

WIDE = Shape(prefill=1, decode=2, head_dim=256, pool_slots=100, load_timeout_s=1.0)
"""Blocks of 16 KiB; D0 is on the host of P0, D1 on the other one."""

GREEDY = {"max_tokens": 6, "ignore_eos": True}
NUM_BLOCKS = 20


def prompt_of(i: int, length: int = 8 * NUM_BLOCKS + 3) -> list[int]:
    return [(i * 41 + j * 13 + j * j) % 200 for j in range(length)]


def holds(cluster: LocalCluster, pool: str, prompt: list[int]) -> bool:
    """Whether a pool node still holds any block of a prompt."""
    hashes = cluster.block_hashes(prompt)
    return not set(hashes).isdisjoint(cluster.services[pool]._state.table.public_hashes())


def has_moved(proxy: FaultProxy, num_bytes: int) -> bool:
    return proxy.to_server.num_bytes > num_bytes


async def overwrite(cluster: LocalCluster, pool: str, prompt: list[int]) -> None:
    """Ask for others until no block of `prompt` is in that pool node any more."""
    num = 0
    while holds(cluster, pool, prompt):
        num += 1
        assert num < 20, cluster.services[pool].stats()
        await cluster.check(prompt_of(100 + num), **GREEDY)


@pytest.mark.parametrize("after", [0, 7])
async def test_b30_a_stopped_decode_reader_notices_that_its_lease_ran_out(monkeypatch, after):
    """B30: it would decode on whatever is in the slots by then, with a 200."""
    monkeypatch.setattr(decode.pool_link, "LEASE_TTL_S", 0.3)
    shape = Shape(hosts=1, prefill=1, decode=2, pool_slots=60)
    async with running(monkeypatch, shape) as cluster:
        stopped = cluster.engines["decode-0"]
        stopped.hold_loads(after)  # before the load, or in the middle of it
        cluster.only = {"decode-0"}
        asking = asyncio.create_task(cluster.check(prompt_of(0), **GREEDY))
        await cluster.until(lambda: stopped.is_held)
        await cluster.until(lambda: cluster.pool_counter("leases_expired") >= 1)
        cluster.only = {"decode-1"}
        await overwrite(cluster, "pool-0", prompt_of(0))
        assert not asking.done()
        stopped.release()
        await asking


async def test_b30_a_stopped_prefill_reader_notices_that_its_lease_ran_out(monkeypatch):
    """B30: the same for the reused prefix, whose blocks nobody else holds."""
    shape = Shape(prefill=4, decode=1, pool_slots=60, load_timeout_s=0.2)
    async with running(monkeypatch, shape) as cluster:
        cluster.only = {"prefill-3"}  # on host 1, as prefill-1; decode is on host 0
        await cluster.check(prompt_of(0), **GREEDY)
        await cluster.settle()
        stopped = cluster.engines["prefill-1"]
        stopped.hold_loads(after=3)
        cluster.only = {"prefill-1"}
        asking = asyncio.create_task(cluster.check(prompt_of(0), **GREEDY))
        await cluster.until(lambda: stopped.is_held)
        await cluster.until(lambda: cluster.pool_counter("leases_expired") >= 1)
        cluster.only = {"prefill-3"}
        await overwrite(cluster, "pool-1", prompt_of(0))
        assert not asking.done()
        stopped.release()
        await asking
        assert cluster.services["prefill-1"].stats()["corrupt_blocks_total"] >= 1


async def test_b31_slots_of_an_aborted_transfer_wait_for_its_end(monkeypatch):
    """B31: given to the next request at once, they get the late bytes of the first one."""
    shape = Shape(prefill=1, decode=2, head_dim=256, pool_slots=44, prefill_blocks=100)
    async with running(monkeypatch, shape) as cluster:
        cluster.only = {"decode-1"}
        proxy = await cluster.proxied("prefill-0", "pool-1")
        node = cluster.services["pool-1"]
        quarantined = 0
        for turn in range(4):
            start = proxy.to_server.num_bytes
            proxy.to_server.bytes_per_s = 400_000.0
            asking = asyncio.create_task(cluster.complete(prompt_of(turn), **GREEDY))
            await cluster.until(functools.partial(has_moved, proxy, start + 100_000))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await cluster.until(
                lambda: node.stats().num_quarantined or not node.stats().num_reserved
            )
            quarantined += node.stats().num_quarantined
            # Two of them need more slots than are free without those.
            following = [cluster.check(prompt_of(50 + 2 * turn + i), **GREEDY) for i in range(2)]
            proxy.to_server.bytes_per_s = None
            await asyncio.gather(*following)
            await cluster.settle()
        assert quarantined > 0


@pytest.mark.parametrize("fault", ["flip", "cut", "hang"])
@pytest.mark.parametrize("at_bytes", [10, 150, 30_000, 200_000])
async def test_a_wire_that_misbehaves_costs_time_and_no_token(monkeypatch, fault, at_bytes):
    """B31: in a control frame, in the first layer's bytes, in a later layer's bytes."""
    async with running(monkeypatch, WIDE) as cluster:
        cluster.only = {"decode-1"}
        proxy = await cluster.proxied("prefill-0", "pool-1")
        await cluster.check(prompt_of(9), **GREEDY)  # the connection is there
        await cluster.settle()
        offset = proxy.to_server.num_bytes + at_bytes
        if fault == "flip":
            proxy.to_server.flip_at = offset
        elif fault == "cut":
            proxy.to_server.cut_at = offset
        else:
            proxy.to_server.hang()
        asking = asyncio.create_task(cluster.check(prompt_of(1), **GREEDY))
        if fault == "hang":
            await cluster.until(lambda: cluster.engines["prefill-0"].num_steps >= 16)
            proxy.to_server.resume()
        if fault == "cut":
            await cluster.until(lambda: proxy.to_server.num_bytes >= offset)
            proxy.to_server.cut_at = None
        await asking
        assert proxy.to_server.num_bytes > offset
        await cluster.settle()
        await cluster.check(prompt_of(1), **GREEDY)


async def test_a_wire_between_pool_nodes_that_misbehaves(monkeypatch):
    """B31: a fetched prefix that is flipped or cut is a miss."""
    shape = Shape(prefill=2, decode=1, head_dim=256)
    async with running(monkeypatch, shape) as cluster:
        proxy = await cluster.proxied("pool-1", "pool-0")
        for turn, kind in enumerate(("flip_at", "flip_at", "cut_at", "cut_at")):
            prompt = prompt_of(turn)
            await cluster.check(prompt, **GREEDY)  # by P0, whose blocks are at pool-0
            await cluster.settle()
            offset = proxy.to_client.num_bytes + (40, 90_000)[turn % 2]
            setattr(proxy.to_client, kind, offset)
            reply = await cluster.check(prompt, **GREEDY)  # by P1, through the wire
            assert proxy.to_client.num_bytes > offset
            assert reply.cached_tokens < 8 * NUM_BLOCKS
            setattr(proxy.to_client, kind, None)
            await cluster.settle()
