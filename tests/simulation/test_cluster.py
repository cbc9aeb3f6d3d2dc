"""Seeded simulation: real control code, toy engines, a virtual clock and a hostile network.

Every answer is compared with the oracle, and afterwards every counter must be at its base. A
failing seed is in the test's name; `pytest -k` with it replays the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.request_events import Abandoned, Finished
from core.requests import FinishReason, SamplingParams
from engine.toy import toy_generate
from tests.harness.sim_cluster import SPEC, Shape, SimCluster
from tests.harness.sim_net import SimNet
from tests.harness.virtual_loop import run_virtual


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="hm-") as path:  # short: socket paths are
        yield Path(path)


def draw_prompt(chance: random.Random, shared: list[int]) -> list[int]:
    """Some prompts begin like others, and lengths gather around block boundaries."""
    length = max(1, chance.choice((1, 4, 8, 12, 16, 32, 64, 100)) + chance.randrange(-1, 2))
    head = shared[: chance.choice((0, 0, 8, 16, 40))]
    return (head + [chance.randrange(8, SPEC.vocab_size) for _ in range(length)])[:120]


def draw_params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.choice((1, 2, 5, 20, 60)),
        temperature=chance.choice((0.0, 0.0, 1.0)),
        seed=chance.randrange(1 << 30),
        stop_token_ids=SPEC.eos_token_ids,
        min_tokens=chance.choice((0, 0, 1)),
    )


async def one_request(cluster: SimCluster, chance: random.Random, shared: list[int]) -> int:
    await asyncio.sleep(chance.uniform(0, 8))
    prompt, params = draw_prompt(chance, shared), draw_params(chance)
    leave_after = chance.choice((None, None, None, None, 0, 1, 3))
    expected = toy_generate(prompt, params, SPEC)
    answer = await cluster.generate(prompt, params, leave_after=leave_after)
    if isinstance(answer.outcome, Abandoned):
        assert leave_after is not None
        assert answer.token_ids == expected[: len(answer.token_ids)]
    else:
        assert answer.token_ids == expected, answer.outcome
        ended_by_stop = expected[-1] in params.stop_token_ids
        reason = FinishReason.STOP if ended_by_stop else FinishReason.LENGTH
        assert answer.outcome == Finished(reason)
    return answer.migrations


async def trouble(cluster: SimCluster, chance: random.Random, num_faults: int) -> None:
    """Kill and restart, stop and continue, cut: one fault at a time, at random moments."""
    names = [n for n in cluster.services if n != "gateway"]
    for _ in range(num_faults):
        await asyncio.sleep(chance.uniform(0.05, 1.5))
        name = chance.choice(names)
        match chance.choice(("kill", "kill", "cut", "hang", "flip")):
            case "kill":
                await cluster.kill(name)
                await asyncio.sleep(chance.uniform(0.05, 2.0))
                await cluster.restart(name)
            case "cut":
                cluster.net.cut(name)
            case "flip":
                for pool in range(cluster.shape.hosts):
                    cluster.flip_bits(f"pool-{pool}", count=5)
            case "hang":
                cluster.net.faults.hung.add(name)
                await asyncio.sleep(chance.uniform(0.1, 6.0))
                cluster.net.faults.hung.discard(name)


@contextlib.asynccontextmanager
async def running(cluster: SimCluster) -> AsyncIterator[None]:
    """Stop the cluster however its story ends: sockets of a broken one would warn much later."""
    try:
        await cluster.start()
        yield
    finally:
        await cluster.stop()


def simulate(seed, directory, monkeypatch, shape, *, num_requests, num_faults, repeat=0.0):
    """Run one seeded story; return how many migrations it had."""
    chance = random.Random(seed)
    net = SimNet(seed)
    net.faults.repeat_probability = repeat

    async def main() -> int:
        cluster = SimCluster(seed, directory, net, monkeypatch, shape)
        async with running(cluster):
            shared = [chance.randrange(8, SPEC.vocab_size) for _ in range(40)]
            requests = [
                asyncio.create_task(one_request(cluster, random.Random(f"{seed}/{i}"), shared))
                for i in range(num_requests)
            ]
            await trouble(cluster, chance, num_faults)
            migrations = sum(await asyncio.gather(*requests))
            await cluster.settle()
        return migrations

    return run_virtual(main, seed=seed)


def test_what_processes_count_reaches_the_conductor(directory, monkeypatch):
    """The same prompts from everywhere move blocks over every kind of link."""

    async def main() -> None:
        shape = Shape(policy="round-robin")
        cluster = SimCluster(7, directory, SimNet(7), monkeypatch, shape)
        async with running(cluster):
            for first in (10, 10, 200, 10, 200, 200, 10):
                await cluster.generate(range(first, first + 60), SamplingParams(max_tokens=20))
            await cluster.settle()
            cluster.flip_bits("pool-0", count=500)
            await cluster.kill("prefill-0")  # the next one has to read the pool
            await cluster.restart("prefill-0")
            await asyncio.sleep(2.0)
            for _ in range(2):
                await cluster.generate(range(10, 70), SamplingParams(max_tokens=20))
            await cluster.settle()
            await asyncio.sleep(2.0)
            stats = {n: dict(cluster.services[n].stats().counters) for n in ("pool-0", "pool-1")}
            rows = {row.name: row for row in (await cluster.dispatcher.cluster_state(5.0)).workers}
        moved: Counter[tuple[str, str]] = Counter()
        for row in rows.values():
            report = row.report or row.pool_report
            assert report is not None
            for link in report.transfers:
                kinds = (link.source.split("-")[0], link.destination.split("-")[0])
                moved[kinds] += link.num_bytes
                assert link.num_bytes % SPEC.layer_slice_bytes == 0
        assert {kinds for kinds, num_bytes in moved.items() if num_bytes} == {
            ("prefill", "pool"), ("pool", "prefill"), ("pool", "pool"), ("pool", "decode"),
            ("decode", "pool"),
        }  # fmt: skip
        for pool in ("pool-0", "pool-1"):
            pool_report = rows[pool].pool_report
            assert pool_report is not None
            totals, counted = pool_report.totals, stats[pool]
            assert totals.num_fetched_blocks == counted["blocks_fetched"]
            assert totals.num_evicted_blocks == counted["blocks_evicted"]
            assert totals.num_expired_leases == counted["leases_expired"]
            corrupted = counted.get("blocks_corrupt", 0) + counted.get("blocks_mismatched", 0)
            assert totals.num_corrupted_blocks == corrupted
            assert totals.num_corrupted_blocks or pool != "pool-0"
        assert rows["pool-0"].slot_bytes == SPEC.block_bytes

    run_virtual(main, seed=7)


@pytest.mark.parametrize("seed", range(4))
def test_calm(seed, directory, monkeypatch):
    migrations = simulate(
        seed, directory, monkeypatch, Shape(), num_requests=40, num_faults=0, repeat=0.2
    )
    assert migrations == 0


@pytest.mark.parametrize("seed", range(100, 112))
def test_faults(seed, directory, monkeypatch):
    simulate(seed, directory, monkeypatch, Shape(), num_requests=40, num_faults=6, repeat=0.05)


@pytest.mark.parametrize("seed", range(200, 204))
def test_coupled_workers_under_faults(seed, directory, monkeypatch):
    shape = Shape(hosts=1, prefill=0, decode=0, coupled=2)
    simulate(seed, directory, monkeypatch, shape, num_requests=30, num_faults=4)


@pytest.mark.parametrize("seed", range(300, 304))
def test_little_memory_preempts_and_still_answers(seed, directory, monkeypatch):
    shape = Shape(decode_blocks=50, prefill_blocks=48, pool_slots=110)
    migrations = simulate(seed, directory, monkeypatch, shape, num_requests=40, num_faults=0)
    assert migrations >= 0


@pytest.mark.parametrize("seed", range(400, 404))
def test_flipped_bits_are_never_read_as_truth(seed, directory, monkeypatch):
    simulate_flips(seed, directory, monkeypatch)


def test_the_harness_sees_what_an_unchecked_flip_does(directory, monkeypatch):
    """Without the reader's checksum the same stories go wrong: the test above proves something."""
    monkeypatch.setattr("prefill.pool_link.block_checksum", AnyChecksum)
    monkeypatch.setattr("decode.pool_link.block_checksum", AnyChecksum)
    with pytest.raises(AssertionError):
        for seed in range(400, 404):
            simulate_flips(seed, directory, monkeypatch)
    gc.collect()  # a socket that was left open warns now, not in somebody else's test


class AnyChecksum:
    """Equal to every checksum."""

    def __init__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def simulate_flips(seed, directory, monkeypatch):
    """Few prompts, asked again and again, while bits flip all the time."""

    async def main() -> None:
        cluster = SimCluster(seed, directory, SimNet(seed), monkeypatch, Shape())
        async with running(cluster):
            chance = random.Random(seed)
            prompts = [[chance.randrange(8, 500) for _ in range(60)] for _ in range(3)]
            for turn in range(24):
                prompt = prompts[turn % 3]
                params = SamplingParams(max_tokens=6)
                answer = await cluster.generate(prompt, params)
                assert answer.token_ids == toy_generate(prompt, params, SPEC), f"turn {turn}"
                for host in range(2):
                    cluster.flip_bits(f"pool-{host}", count=25)
            await cluster.settle()

    run_virtual(main, seed=seed)
