"""The same seed gives the same tokens, whatever happens around the request (B18)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.harness.local_cluster import LocalCluster, Reply, Shape, running

PROMPT = list(range(30, 67))
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 41, "max_tokens": 24, "ignore_eos": True}
MANY: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}


def neighbours(cluster: LocalCluster, count: int = 7) -> list[asyncio.Task[Reply]]:
    """Others in the same batches: seeded, unseeded, greedy."""
    chance = random.Random(5)
    made = []
    for i in range(count):
        fields = MANY | ({}, {"seed": i}, {"temperature": 0})[i % 3]
        prompt = [chance.randrange(200) for _ in range(40)]
        made.append(asyncio.create_task(cluster.complete(prompt, **fields)))
    return made


async def test_b18_alone_with_a_hit_and_with_neighbours(monkeypatch):
    """B18: random state of a batch instead of a request changes with the company."""
    async with running(monkeypatch) as cluster:
        assert (await cluster.check(PROMPT, **SEEDED)).cached_tokens == 0
        await cluster.settle()
        assert (await cluster.check(PROMPT, **SEEDED)).cached_tokens == 32
        others = neighbours(cluster)
        together = [cluster.check(PROMPT, **SEEDED | {"seed": 41 + i}) for i in range(4)]
        together += [cluster.check(PROMPT, **SEEDED | {"temperature": t}) for t in (0, 0.5)]
        await asyncio.gather(*together)
        assert all(reply.status == 200 for reply in await asyncio.gather(*others))
        unseeded = [await cluster.complete(PROMPT, **MANY) for _ in range(2)]
        assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_b18_after_a_preemption(monkeypatch):
    """B18: what was preempted goes on with the next random number, not the first."""
    shape = Shape(hosts=1, prefill=1, decode=1, decode_blocks=34)
    async with running(monkeypatch, shape) as cluster:
        fields = SEEDED | {"max_tokens": 80}
        await asyncio.gather(*(cluster.check(PROMPT[i:], **fields | {"seed": i}) for i in range(6)))
        preempted = await cluster.metric("vllm:num_preemptions_total")
        assert 1 <= preempted < 60


@pytest.mark.parametrize("kind", ["decode", "prefill", "pool"])
async def test_b18_after_a_kill(monkeypatch, kind):
    """B18: the random numbers of the tokens to come do not depend on who makes them."""
    async with running(monkeypatch) as cluster:
        await cluster.check(PROMPT, **SEEDED)
        worker = "prefill" if kind == "prefill" else "decode"
        cluster.hold(worker, after=0 if kind == "prefill" else 5)
        fields = SEEDED | {"stream": True, "seed": 43}
        asking = asyncio.create_task(cluster.check(PROMPT[::-1], **fields))
        held = await cluster.held(worker)
        victim = f"pool-{int(held[-1]) % 2}" if kind == "pool" else held
        await cluster.kill(victim)
        for engine in cluster.engines.values():
            engine.release()
        await asking
        await cluster.restart(victim)
        await cluster.until_registered()
        assert await cluster.metric("halfmoon_migrations_total") == (kind != "pool")
        await cluster.check(PROMPT[::-1], **fields)
