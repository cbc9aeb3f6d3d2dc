"""The real worker over real sockets, with a real pool node and the toy engine."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import pytest_asyncio

from core.hashing import extend_block_hashes
from core.messages.to_gateway import FailureCode
from core.messages.to_prefill import CancelPrefill, PrefillRequest
from core.requests import FinishReason, SamplingParams
from engine.toy import toy_generate
from tests.prefill.shell import (
    BLOCK,
    ROOT,
    SPEC,
    Site,
    eventually,
    prompt,
    reference_blocks,
    source,
)


@pytest_asyncio.fixture
async def site():
    made = Site()
    await made.conductor.start()
    yield made
    await made.close()


def oracle(token_ids) -> int:
    return toy_generate(token_ids, SamplingParams(max_tokens=1), SPEC)[0]


def has_written(worker, num_bytes: int) -> bool:
    return bool(worker.stats()["written_local_bytes_total"] == num_bytes)


def origins(token) -> tuple[int, int, int]:
    stats = token.stats
    return stats.computed_tokens, stats.cached_local_tokens, stats.cached_pool_tokens


@pytest.mark.parametrize("where", ["same host", "other host"])
async def test_a_prompt_reaches_decode_byte_for_byte_and_the_gateway_its_token(site, where):
    node = await site.node("a")
    worker = await site.worker("p", "a")
    decode_node = node if where == "same host" else await site.node("b")
    gateway, decode = await site.gateway(worker), await site.decode(worker, decode_node)
    token_ids = prompt(5 * BLOCK + 3)
    attempt = gateway.new_attempt()
    slots = await decode.reserve(attempt, token_ids)
    decode.send_slots(attempt, slots)
    gateway.send(token_ids, attempt=attempt, decode=decode.ref)

    token = await gateway.token(attempt)
    assert (token.seq, token.token_id, token.finish) == (0, oracle(token_ids), None)
    assert origins(token) == (len(token_ids), 0, 0)
    assert await decode.blocks(attempt, slots) == reference_blocks(token_ids)
    await eventually(lambda: attempt in decode.finished)
    assert decode.finished[attempt].token_id == token.token_id
    assert not decode.finished[attempt].finished
    decode.release(attempt)
    await site.at_base()
    assert node.stats().num_committed == 5  # decode's copy, or a published one of our own
    sent = worker.stats()
    kind = "written_local_bytes_total" if where == "same host" else "written_remote_bytes_total"
    assert sent[kind] >= 6 * SPEC.block_bytes


async def test_slots_that_come_after_the_token_get_everything(site):
    node = await site.node("a")
    worker = await site.worker("p", "a")
    gateway, decode = await site.gateway(worker), await site.decode(worker, node)
    token_ids = prompt(2 * BLOCK + 1)
    attempt = gateway.send(token_ids, decode=decode.ref)
    await gateway.token(attempt)
    slots = await decode.reserve(attempt, token_ids)
    decode.send_slots(attempt, slots[:1])
    decode.send_slots(attempt, slots[1:])
    assert await decode.blocks(attempt, slots) == reference_blocks(token_ids)
    await eventually(lambda: attempt in decode.finished)
    decode.release(attempt)
    await site.at_base()


async def test_each_layer_leaves_before_the_next_one_is_computed(site):
    node = await site.node("a")
    worker = await site.worker("p", "a")
    engine = site.engines["p"]
    gateway, decode = await site.gateway(worker), await site.decode(worker, node)
    token_ids = prompt(3 * BLOCK + 1)
    attempt = gateway.new_attempt()
    slots = await decode.reserve(attempt, token_ids)
    decode.send_slots(attempt, slots)
    engine.gate = threading.Semaphore(0)
    gateway.send(token_ids, attempt=attempt, decode=decode.ref)
    for layer in range(SPEC.num_layers):
        expected = (layer + 1) * len(slots) * SPEC.layer_slice_bytes
        await eventually(partial(has_written, worker, expected))
        assert engine.layers_done == layer + 1  # the engine stands at the gate after this layer
        engine.gate.release()
    assert await decode.blocks(attempt, slots) == reference_blocks(token_ids)
    await gateway.token(attempt)
    decode.release(attempt)
    await site.at_base()


@pytest.mark.parametrize(
    "length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 64 + BLOCK]
)
async def test_b25_every_length_cold_warm_from_the_pool_and_from_another_host(site, length):
    a, b = await site.node("a"), await site.node("b")
    first, second = await site.worker("p0", "a"), await site.worker("p1", "a")
    third = await site.worker("p2", "b")
    token_ids, most = prompt(length), (length - 1) // BLOCK * BLOCK
    expected = {
        "p0": [(length, 0, 0), (length - most, most, 0)],
        "p1": [(length - most, 0, most), (length - most, most, 0)],
        "p2": [(length - most, 0, most)],
    }
    for worker, sources in ((first, ()), (second, ()), (third, (source(a, length // BLOCK),))):
        gateway = await site.gateway(worker, "to " + worker.ref.name)
        for origin in expected[worker.ref.name]:
            token = await gateway.ask(token_ids, sources=sources)
            assert (token.token_id, origins(token)) == (oracle(token_ids), origin)
            assert token.finish is FinishReason.LENGTH
            await site.at_base()
    assert a.stats().num_committed == b.stats().num_committed == length // BLOCK


async def test_b27_sixteen_identical_prompts_at_once_on_two_workers(site):
    await site.node("a")
    workers = [await site.worker(name, "a") for name in ("p0", "p1")]
    gateways = [await site.gateway(w, "to " + w.ref.name) for w in workers]
    token_ids = prompt(9 * BLOCK + 5)
    attempts = [(gateways[i % 2], gateways[i % 2].send(token_ids)) for i in range(16)]
    tokens = [await gateway.token(attempt) for gateway, attempt in attempts]
    assert {token.token_id for token in tokens} == {oracle(token_ids)}
    await site.at_base()
    for worker in workers:
        counted = worker.stats()
        assert counted["prompt_tokens_computed_total"] <= len(token_ids) + 7 * BLOCK


async def test_short_prompts_share_a_step_and_a_frame(site):
    worker = await site.worker("p", "none")
    gateway, engine = await site.gateway(worker), site.engines["p"]
    engine.gate = threading.Semaphore(0)
    first = gateway.send(prompt(3, 1))
    await eventually(lambda: engine.layers_done == 1)
    attempts = [gateway.send(prompt(3, seed)) for seed in (2, 3, 4)]
    await eventually(lambda: worker.stats()["requests_running"] == 4)
    engine.gate.release(2 * SPEC.num_layers)
    for seed, attempt in enumerate([first, *attempts], start=1):
        assert (await gateway.token(attempt)).token_id == oracle(prompt(3, seed))
    assert gateway.num_frames == 2


@pytest.mark.parametrize("phase", ["queued", "loading", "computing", "handing off"])
async def test_a_cancel_leaves_nothing(site, phase):
    node = await site.node("a")
    worker = await site.worker("p", "a", num_blocks=8)
    engine = site.engines["p"]
    gateway, decode = await site.gateway(worker), await site.decode(worker, node)
    warm = prompt(4 * BLOCK)
    if phase == "loading":  # something to load, that this worker's own cache does not hold
        other = await site.worker("warm", "a")
        await (await site.gateway(other, "warm")).ask(warm)
        await site.at_base()
    if phase != "handing off":
        engine.gate = threading.Semaphore(0)
    attempts = [gateway.new_attempt() for _ in range(2)]
    prompts = [prompt(7 * BLOCK + 1, 5), warm]
    count = 1 if phase == "computing" else 2
    for attempt, token_ids in list(zip(attempts, prompts, strict=True))[:count]:
        decode.send_slots(attempt, await decode.reserve(attempt, token_ids))
        gateway.send(token_ids, attempt=attempt, decode=decode.ref)
        if phase == "handing off":
            await gateway.token(attempt)
            break
    if engine.gate is not None:
        await eventually(lambda: engine.layers_done == 1)
    for attempt in attempts:
        gateway.conn.post(CancelPrefill(attempt))
    await eventually(lambda: set(decode.gone) >= set(attempts[:1]))
    if engine.gate is not None:
        engine.gate.release(100)
    for attempt in attempts:
        decode.client.close_transfer(attempt)
    await site.at_base()
    engine.gate = None
    assert (await gateway.ask(prompt(20, 9))).token_id == oracle(prompt(20, 9))
    assert gateway.failures == {}


async def test_a_step_that_nobody_wants_any_more_ends_after_its_layer(site):
    worker = await site.worker("p", "none")
    gateway, engine = await site.gateway(worker), site.engines["p"]
    engine.gate = threading.Semaphore(0)
    attempt = gateway.send(prompt(4 * BLOCK, 1))
    await eventually(lambda: engine.layers_done == 1)
    gateway.conn.post(CancelPrefill(attempt))
    await eventually(lambda: worker.stats()["requests_running"] == 0)
    assert worker.stats()["kv_cache_usage"] == 4 / 64  # the step may still write
    engine.gate.release(100)
    await site.at_base()
    assert engine.layers_done == 2 < SPEC.num_layers
    token = await gateway.ask(prompt(4 * BLOCK, 1))
    assert token.token_id == oracle(prompt(4 * BLOCK, 1))
    assert origins(token) == (4 * BLOCK, 0, 0)


async def test_a_step_goes_on_for_those_in_it_that_live(site):
    worker = await site.worker("p", "none")
    gateway, engine = await site.gateway(worker), site.engines["p"]
    engine.gate = threading.Semaphore(0)
    gateway.send(prompt(3, 1))
    await eventually(lambda: engine.layers_done == 1)
    leaves, stays = (gateway.send(prompt(3, seed)) for seed in (2, 3))
    await eventually(lambda: worker.stats()["requests_running"] == 3)
    engine.gate.release(SPEC.num_layers)
    await eventually(lambda: engine.layers_done == SPEC.num_layers + 1)
    gateway.conn.post(CancelPrefill(leaves))
    await eventually(lambda: worker.stats()["requests_running"] == 1)
    engine.gate.release(SPEC.num_layers)
    assert (await gateway.token(stays)).token_id == oracle(prompt(3, 3))
    assert engine.layers_done == 2 * SPEC.num_layers
    assert leaves not in gateway.tokens
    await site.at_base()


async def test_a_lost_gateway_or_decode_worker_ends_what_was_for_it(site):
    node = await site.node("a")
    worker = await site.worker("p", "a")
    gateway, decode = await site.gateway(worker), await site.decode(worker, node)
    attempt = gateway.send(prompt(20), decode=decode.ref)
    await gateway.token(attempt)
    decode.send_slots(attempt, [])
    await eventually(lambda: attempt in decode.finished)
    await decode.close()
    await eventually(lambda: attempt in gateway.failures)
    assert gateway.failures[attempt].code is FailureCode.PEER_LOST
    assert worker.idle

    again = await site.decode(worker, node)
    attempt = gateway.send(prompt(20), decode=again.ref)
    await gateway.token(attempt)
    again.send_slots(attempt, [])
    await eventually(lambda: attempt in again.finished)
    gateway.conn.close()
    await eventually(lambda: again.gone == [attempt])
    await site.at_base()


async def test_a_corrupt_block_is_a_miss(site):
    node = await site.node("a")
    first, second = await site.worker("p0", "a"), await site.worker("p1", "a")
    token_ids = prompt(4 * BLOCK + 1)
    await (await site.gateway(first, "to p0")).ask(token_ids)
    await site.at_base()
    decode = await site.decode(second, node)
    spoiler = (await site.gateway(second, "spoiler")).new_attempt()
    hashes = extend_block_hashes(ROOT, token_ids, BLOCK)
    blocks = await decode.client.lease(spoiler, hashes, ttl_s=10)
    decode.client.slot(blocks[2].handle)[100] ^= 1
    decode.client.close_transfer(spoiler)

    token = await (await site.gateway(second, "to p1")).ask(token_ids)
    assert token.token_id == oracle(token_ids)
    assert origins(token) == (len(token_ids) - 2 * BLOCK, 0, 2 * BLOCK)
    assert second.stats()["corrupt_blocks_total"] == 1
    await site.at_base()
    third = await site.worker("p2", "a")  # the bad copy is gone, the new one is in its place
    assert origins(await (await site.gateway(third, "to p2")).ask(token_ids)) == (1, 0, 4 * BLOCK)


async def test_leases_last_no_longer_than_the_load(site):
    node = await site.node("a")
    first, second = await site.worker("p0", "a"), await site.worker("p1", "a")
    token_ids = prompt(4 * BLOCK + 1)
    await (await site.gateway(first, "to p0")).ask(token_ids)
    await site.at_base()
    engine = site.engines["p1"]
    engine.gate = threading.Semaphore(0)
    gateway = await site.gateway(second, "to p1")
    attempt = gateway.send(token_ids)
    await eventually(lambda: engine.layers_done == 1)
    assert node.stats().num_leases == 0
    engine.gate.release(100)
    assert origins(await gateway.token(attempt)) == (1, 0, 4 * BLOCK)


async def test_a_pool_node_that_dies_costs_a_recompute_and_its_next_life_is_used(site):
    node = await site.node("a")
    first, second = await site.worker("p0", "a"), await site.worker("p1", "a")
    one, two = await site.gateway(first, "to p0"), await site.gateway(second, "to p1")
    token_ids = prompt(4 * BLOCK + 1)
    await one.ask(token_ids)
    await site.at_base()
    await node.stop()
    token = await two.ask(token_ids)
    assert (token.token_id, origins(token)) == (oracle(token_ids), (len(token_ids), 0, 0))

    node = await site.node("a")
    await eventually(lambda: first.ref.pool == second.ref.pool == node.ref)
    await eventually(
        lambda: (
            {w.ref.name for w in site.conductor.workers if w.ref.pool == node.ref} == {"p0", "p1"}
        )
    )
    other = prompt(4 * BLOCK + 1, 3)
    await one.ask(other)
    await site.at_base()
    assert origins(await two.ask(other)) == (1, 0, 4 * BLOCK)
    await site.at_base()


async def test_a_pool_node_that_dies_under_a_push_does_not_stop_the_token(site):
    await site.node("a")
    b = await site.node("b")
    worker = await site.worker("p", "a")
    engine = site.engines["p"]
    gateway, decode = await site.gateway(worker), await site.decode(worker, b)
    token_ids = prompt(3 * BLOCK + 1)
    attempt = gateway.new_attempt()
    decode.send_slots(attempt, await decode.reserve(attempt, token_ids))
    engine.gate = threading.Semaphore(0)
    gateway.send(token_ids, attempt=attempt, decode=decode.ref)
    await eventually(lambda: engine.layers_done == 1)
    await b.stop()
    del site.nodes["b"]
    engine.gate.release(100)
    assert (await gateway.token(attempt)).token_id == oracle(token_ids)
    await decode.close()
    await eventually(lambda: attempt in gateway.failures)
    await site.at_base()


async def test_without_a_pool_node_it_computes_and_writes_to_decode(site):
    b = await site.node("b")
    worker = await site.worker("p", "none")
    gateway, decode = await site.gateway(worker), await site.decode(worker, b)
    token_ids = prompt(2 * BLOCK + 1)
    attempt = gateway.new_attempt()
    slots = await decode.reserve(attempt, token_ids)
    decode.send_slots(attempt, slots)
    gateway.send(token_ids, attempt=attempt, decode=decode.ref)
    assert await decode.blocks(attempt, slots) == reference_blocks(token_ids)
    assert (await gateway.token(attempt)).token_id == oracle(token_ids)
    decode.release(attempt)
    await site.at_base()


async def test_prompt_logprobs_cover_the_prompt_though_it_is_cached(site):
    await site.node("a")
    worker = await site.worker("p", "a")
    gateway = await site.gateway(worker)
    token_ids = prompt(5 * BLOCK)
    await gateway.ask(token_ids)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    token = await gateway.ask(token_ids, params=params, num_reusable_blocks=0)
    assert [p.chosen.token_id for p in token.prompt_logprobs] == list(token_ids[1:])
    assert origins(token) == (len(token_ids), 0, 0)


async def test_a_prompt_that_breaks_the_model_fails_alone(site):
    worker = await site.worker("p", "none")
    gateway, engine = await site.gateway(worker), site.engines["p"]
    engine.fails_on = 999
    bad = gateway.send((999,))
    good = gateway.send(prompt(5))
    assert (await gateway.token(good)).token_id == oracle(prompt(5))
    await eventually(lambda: bad in gateway.failures)
    assert gateway.failures[bad].code is FailureCode.ENGINE_ERROR


async def test_it_reports_its_load_and_a_drain(site):
    worker = await site.worker("p", "none")
    engine, gateway = site.engines["p"], await site.gateway(worker)
    engine.gate = threading.Semaphore(0)
    gateway.send(prompt(40))
    await eventually(
        lambda: any(r.prefill.queued_tokens == 40 for r in site.conductor.reports if r.prefill)
    )
    worker.drain()
    await eventually(lambda: site.conductor.reports[-1].draining)
    refused = gateway.send(prompt(5))
    await eventually(lambda: refused in gateway.failures)
    assert gateway.failures[refused].code is FailureCode.DRAINING
    engine.gate.release(100)
    await eventually(lambda: len(gateway.tokens) == 1)


@pytest.mark.parametrize("kind", [PrefillRequest, CancelPrefill])
async def test_a_gateway_speaks_for_its_own_requests_only(site, kind):
    worker = await site.worker("p", "none")
    owner, other = await site.gateway(worker), await site.gateway(worker)
    engine = site.engines["p"]
    engine.gate = threading.Semaphore(0)
    attempt = owner.new_attempt()
    if kind is PrefillRequest:
        other.send(prompt(5), attempt=attempt)
        await asyncio.wait_for(other.closed.wait(), 5)
        assert worker.idle
    else:
        owner.send(prompt(5), attempt=attempt)
        await eventually(lambda: engine.layers_done == 1)
        other.conn.post(CancelPrefill(attempt))
        await asyncio.wait_for(other.closed.wait(), 5)
        engine.gate.release(100)
        assert (await owner.token(attempt)).token_id == oracle(prompt(5))


async def test_a_request_that_contradicts_itself_ends_the_connection(site):
    worker = await site.worker("p", "none")
    gateway = await site.gateway(worker)
    params = SamplingParams(max_tokens=1)
    gateway.conn.post(
        PrefillRequest(gateway.new_attempt(), b"\0" * 68, 0, b"", 0, params, (), None, 0)
    )
    await asyncio.wait_for(gateway.closed.wait(), 5)
    assert worker.idle
