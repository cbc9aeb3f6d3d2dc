"""Little memory: never a deadlock, never a wrong token (B38)."""

from __future__ import annotations

import asyncio

from tests.harness.local_cluster import Shape, running

GREEDY = {"ignore_eos": True}


def prompt_of(i: int, length: int) -> list[int]:
    return [(i * 37 + j * 11) % 200 for j in range(length)]


async def test_b38_eight_that_grow_finish_with_bounded_preemptions(monkeypatch):
    """B38: preempting without progress thrashes; resuming wrongly loses text."""
    shape = Shape(hosts=1, prefill=1, decode=1, decode_blocks=48, pool_slots=120)
    async with running(monkeypatch, shape) as cluster:
        fields = GREEDY | {"max_tokens": 130}  # 20 blocks each in the end
        await asyncio.gather(*(cluster.check(prompt_of(i, 30), **fields) for i in range(8)))
        assert 1 <= await cluster.metric("vllm:num_preemptions_total") < 100


async def test_b38_what_can_never_fit_is_refused_at_once(monkeypatch):
    """B38: waiting for memory that can never be there blocks the queue for ever."""
    shape = Shape(hosts=1, prefill=1, decode=1, prefill_blocks=40, decode_blocks=20)
    async with running(monkeypatch, shape) as cluster:
        for stream in (False, True):
            refused = await cluster.complete(prompt_of(1, 150), max_tokens=50, stream=stream)
            assert (refused.status, refused.body["error"]["code"]) == (
                400, "context_length_exceeded"
            )  # fmt: skip
        await cluster.check(prompt_of(1, 150), max_tokens=8)


async def test_b38_a_short_request_is_not_starved_by_long_ones(monkeypatch):
    """B38: the long one in front waits for memory; the short one behind needs little."""
    shape = Shape(hosts=1, prefill=1, decode=1, decode_blocks=40)
    async with running(monkeypatch, shape) as cluster:
        fields = GREEDY | {"max_tokens": 90}
        long = [asyncio.create_task(cluster.check(prompt_of(i, 120), **fields)) for i in range(3)]
        await cluster.until(lambda: cluster.engines["decode-0"].num_steps > 3)
        await cluster.check(prompt_of(9, 10), max_tokens=4)
        assert not all(task.done() for task in long)
        await asyncio.gather(*long)


async def test_b38_a_pool_of_few_slots_serves_more_than_it_can_hold(monkeypatch):
    """B38: reservations that each wait for the other's slots would never end."""
    shape = Shape(pool_slots=36)
    async with running(monkeypatch, shape) as cluster:
        fields = GREEDY | {"max_tokens": 20}
        lengths = [20 + 9 * i for i in range(12)]
        await asyncio.gather(
            *(cluster.check(prompt_of(i, n), **fields) for i, n in enumerate(lengths))
        )
        await cluster.settle()
        assert cluster.pool_counter("blocks_evicted") > 0
