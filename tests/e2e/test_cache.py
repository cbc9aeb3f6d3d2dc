"""What comes out of the cache is what would have been computed (B07, B25, B27, B29)."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.local_cluster import EOS_ID, Shape, running


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 31 * salt + i * i) % 200 for i in range(length)]


@pytest.mark.parametrize("hosts", [1, 2])
async def test_b07_cached_tokens_are_what_prefill_skipped(monkeypatch, hosts):
    """B07: counting transferred blocks as hits would say prompt - 1, counting none always 0."""
    async with running(monkeypatch, Shape(hosts=hosts)) as cluster:
        size = cluster.spec.block_size
        prompt = prompt_of(3 * size + 5)
        other = prompt[: 2 * size] + prompt_of(size + 5, salt=9)
        for asked, cached in ((prompt, 0), (prompt, 3 * size), (other, 2 * size)):
            for stream in (False, True) if cached == 3 * size else (False,):
                reply = await cluster.check(asked, stream=stream, ignore_eos=True)
                assert reply.cached_tokens == cached
                await cluster.settle()


@pytest.mark.parametrize("shape", [Shape(), Shape(hosts=1, prefill=0, decode=0, coupled=2)])
async def test_b25_every_length_cold_warm_and_on_the_other_prefill(monkeypatch, shape):
    """B25: at a block's edge a full hit would leave nothing to compute, or use wrong KV."""
    async with running(monkeypatch, shape) as cluster:
        size = cluster.spec.block_size
        for length in sorted({k * size + d for k in range(1, 5) for d in (-1, 0, 1)}):
            prompt = prompt_of(length, salt=length)
            cached = []
            for _ in range(3):  # two workers in turn: cold, warm on the other, warm on the first
                cached.append(
                    (await cluster.check(prompt, max_tokens=4, ignore_eos=True)).cached_tokens
                )
                await cluster.settle()
            most = (length - 1) // size * size
            if not shape.coupled:
                assert cached == [0, most, most]


async def test_b25_blocks_that_decode_made_are_hit_by_the_next_turn(monkeypatch):
    """B25: the block at the seam is half prompt, half output."""
    async with running(monkeypatch) as cluster:
        size = cluster.spec.block_size
        for length in (size, size + 3):
            prompt = prompt_of(length, salt=50 + length)
            first = await cluster.check(prompt, max_tokens=2 * size, ignore_eos=True)
            await cluster.settle()
            turn = [*prompt, *first.token_ids, 1, 2, 3]
            assert (await cluster.check(turn)).cached_tokens == (
                length + 2 * size - 1
            ) // size * size
            await cluster.settle()


@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_prompt_whose_first_token_ends_it_is_cached_too(monkeypatch, hosts):
    """Blocks on their way to a decode worker that gave them up would be lost to the next call."""
    async with running(monkeypatch, Shape(hosts=hosts)) as cluster:
        size = cluster.spec.block_size
        prompt = prompt_of(5 * size + 2, salt=70)
        ending = {"forced_token_ids": [EOS_ID], "max_tokens": 9}
        cached = []
        for _ in range(3):
            cached.append((await cluster.check(prompt, **ending)).cached_tokens)
            await cluster.settle()
        assert cached == [0, 5 * size, 5 * size]


async def test_b27_identical_prompts_at_once_on_two_prefill_workers(monkeypatch):
    """B27: a block published before it is complete would be read half-written."""
    async with running(monkeypatch) as cluster:
        for turn in range(3):
            prompt = prompt_of(100, salt=turn)
            await asyncio.gather(*(cluster.check(prompt) for _ in range(16)))
        await cluster.settle()
        assert cluster.pool_counter("blocks_mismatched") == 0


async def test_b27_a_prefill_worker_is_killed_in_the_middle_of_identical_prompts(monkeypatch):
    """B27: what it leaves half-written is nobody's; the others compute it."""
    async with running(monkeypatch) as cluster:
        prompt = prompt_of(100)
        cluster.engines["prefill-0"].hold_steps(after=2)
        asked = [asyncio.create_task(cluster.check(prompt)) for _ in range(16)]
        await cluster.until(lambda: cluster.engines["prefill-0"].is_held)
        await cluster.kill("prefill-0")
        await asyncio.gather(*asked)
        assert await cluster.metric("halfmoon_migrations_total") >= 1
        await cluster.restart("prefill-0")
        await cluster.until_registered()
        assert (await cluster.check(prompt)).cached_tokens == 96


async def test_b29_every_node_finds_what_another_one_stored(monkeypatch):
    """B29: unstable hashes would never hit across nodes; weak ones would hit wrongly."""
    async with running(monkeypatch) as cluster:
        filler = [5] * 30
        await cluster.check([1, 23, *filler])
        await cluster.settle()
        fetched = cluster.pool_counter("blocks_fetched")
        assert (await cluster.check([1, 23, *filler])).cached_tokens == 24
        assert cluster.pool_counter("blocks_fetched") > fetched
        await cluster.settle()
        assert (await cluster.check([12, 3, *filler])).cached_tokens == 0
        await cluster.settle()
        salted = await cluster.check([1, 23, *filler], cache_salt="mine")
        assert salted.cached_tokens == 0
