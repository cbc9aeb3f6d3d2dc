"""The decode worker over real sockets, with a real pool node and the toy engine as oracle."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from core.config import DecodeConfig
from core.hashing import extend_block_hashes
from core.ids import AttemptId, Incarnation, RequestId
from core.messages.to_conductor import BlockSource
from core.messages.to_decode import CancelDecode
from core.messages.to_gateway import FailureCode
from core.requests import FinishReason
from decode.attempts import Phase
from engine.toy import ToyEngine, toy_generate
from prefill.batcher import PrefillBatcher
from tests.decode.parts import Parts, eventually, put_blocks, running_parts
from tests.decode.world import ROOT, SPEC, compute_blocks, params


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [1 + (first + 7 * i) % 63 for i in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17])
async def test_tokens_equal_the_oracle(tmp_path, length):
    async with running_parts(tmp_path) as parts:
        sampling = params(30, seed=5, temperature=1.0)
        request = parts.ask(prompt_of(length), sampling)
        await parts.gateway.finished(request)
        tokens = parts.gateway.tokens[request]
        assert [t.token_id for t in tokens] == toy_generate(prompt_of(length), sampling, SPEC)[1:]
        assert [t.seq for t in tokens] == list(range(1, 30))
        assert tokens[-1].finish is FinishReason.LENGTH
        await parts.at_base()
        await eventually(lambda: parts.prefill.released == [AttemptId(request, 1)])


async def test_many_at_once_share_steps_and_prefixes(tmp_path):
    async with running_parts(tmp_path) as parts:
        shared = prompt_of(12)
        prompts = [shared + prompt_of(1 + i, 10 + i) for i in range(8)]
        requests = [parts.ask(prompt, params(12)) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            await parts.gateway.finished(request)
            assert parts.gateway.ids(request) == toy_generate(prompt, params(12), SPEC)[1:]
        assert len(parts.gateway.frames) < 8 * 11
        await parts.at_base()


async def test_a_first_token_that_ends_the_generation_leaves_nothing(tmp_path):
    async with running_parts(tmp_path) as parts:
        request = parts.ask(prompt_of(6), params(1))
        await eventually(lambda: len(parts.prefill.slots) == 1)
        await parts.at_base()
        assert request not in parts.gateway.tokens
        assert parts.gateway.failures == []


async def test_blocks_made_by_decoding_are_in_the_pool(tmp_path):
    async with running_parts(tmp_path) as parts:
        prompt, sampling = prompt_of(6), params(20)
        request = parts.ask(prompt, sampling)
        await parts.gateway.finished(request)
        await parts.at_base()
        # The KV of the last output was never computed.
        tokens = prompt + toy_generate(prompt, sampling, SPEC)[:-1]
        hashes = extend_block_hashes(ROOT, tokens, SPEC.block_size)
        client = await parts.pool_client()
        reader = AttemptId(RequestId(Incarnation("reader"), 1), 1)
        leased = await client.lease(reader, hashes, ttl_s=5)
        assert len(leased) == len(hashes) == 6
        reference = compute_blocks(tokens)
        assert [bytes(client.slot(b.handle)) for b in leased] == reference[: len(hashes)]
        assert parts.worker.stats()["blocks_published_total"] == 5
        await client.close()


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.RECEIVING, Phase.RUNNING])
@pytest.mark.parametrize("how", ["cancel", "newer attempt", "gateway lost"])
async def test_leaving_in_each_phase_leaves_nothing(tmp_path, phase, how):
    async with running_parts(tmp_path) as parts:
        prompt, sampling = prompt_of(9), params(120)
        if phase is Phase.RECEIVING:
            parts.prefill.finish.clear()
        request = parts.ask(prompt, sampling)
        if phase is Phase.RECEIVING:
            await eventually(lambda: parts.pool.stats().num_committed == 3)
        elif phase is Phase.RUNNING:
            await eventually(lambda: request in parts.gateway.tokens)
        parts.prefill.finish.set()
        assert parts.gateway.conn is not None
        match how:
            case "cancel":
                parts.gateway.post(CancelDecode(AttemptId(request, 1)))
            case "newer attempt":
                short = params(5)
                parts.ask(prompt, short, counter=request.counter, attempt=2)
                await parts.gateway.finished(request)
                ids = [t.token_id for t in parts.gateway.tokens[request] if t.attempt.attempt == 2]
                assert ids == toy_generate(prompt, short, SPEC)[1:]
            case _:
                parts.gateway.conn.close()
        await parts.at_base()
        assert parts.gateway.failures == []


async def test_late_duplicate_and_old_messages_change_nothing(tmp_path):
    async with running_parts(tmp_path) as parts:
        prompt, sampling = prompt_of(7), params(10)
        message = parts.request(prompt, sampling, counter=5, attempt=3)
        old = parts.request(prompt, sampling, counter=5, attempt=2)
        for one in (message, message, old):
            parts.gateway.post(one)
        parts.gateway.post(CancelDecode(old.attempt))
        await parts.gateway.finished(message.attempt.request)
        for one in (message, old):
            parts.gateway.post(one)
        for conn in parts.prefill.connections:
            conn.post(parts.prefill.first_token(message.attempt))
        # A later request on the same connection shows that the others were taken before it.
        last = parts.ask(prompt, sampling)
        await parts.gateway.finished(last)
        await parts.at_base()
        assert len(parts.gateway.tokens[message.attempt.request]) == 9
        assert {s.attempt.attempt for s in parts.prefill.slots} == {1, 3}
        assert parts.gateway.failures == []


async def test_what_never_fits_is_refused_and_the_rest_finish_with_bounded_preemptions(tmp_path):
    """B38: 65 of 64 blocks; 8 requests growing to 20 blocks; a short one beside them."""
    async with running_parts(tmp_path, num_blocks=64) as parts:
        size = SPEC.block_size
        too_long = parts.ask(prompt_of(10), params(65 * size - 10 + 1))
        await eventually(lambda: len(parts.gateway.failures) == 1)
        refusal = parts.gateway.failures.pop()
        assert (refusal.code, refusal.attempt.request) == (FailureCode.NEVER_FITS, too_long)

        parts.resubmit = True
        growing, little = params(20 * size - 6 + 1), params(4)
        asked = {parts.ask(prompt_of(6, i), growing): (prompt_of(6, i), growing) for i in range(8)}
        short = parts.ask(prompt_of(5, 40), little)
        asked[short] = (prompt_of(5, 40), little)
        for request, (prompt, sampling) in asked.items():
            await parts.gateway.finished(request)
            assert parts.merged(request) == toy_generate(prompt, sampling, SPEC)
        assert {f.code for f in parts.gateway.failures} == {FailureCode.PREEMPTED}
        assert max(f.attempt.attempt for f in parts.gateway.failures) <= 4
        assert short not in {f.attempt.request for f in parts.gateway.failures}
        assert parts.worker.stats()["preemptions_total"] == len(parts.gateway.failures)
        await parts.at_base()


async def test_losing_the_prefill_worker_before_all_is_here_gives_the_attempt_back(tmp_path):
    async with running_parts(tmp_path) as parts:
        parts.prefill.finish.clear()
        request = parts.ask(prompt_of(9), params(10))
        await eventually(lambda: len(parts.prefill.connections) == 1)
        for conn in parts.prefill.connections:
            conn.close()
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].code is FailureCode.PEER_LOST
        await parts.at_base()
        parts.prefill.finish.set()
        parts.ask(prompt_of(9), params(10), counter=request.counter, attempt=2)
        await parts.gateway.finished(request)
        assert parts.gateway.ids(request) == toy_generate(prompt_of(9), params(10), SPEC)[1:]


async def test_losing_the_prefill_worker_afterwards_is_no_loss(tmp_path):
    async with running_parts(tmp_path) as parts:
        request = parts.ask(prompt_of(9), params(60))
        await eventually(lambda: request in parts.gateway.tokens)
        await parts.prefill.stop()
        await parts.gateway.finished(request)
        assert parts.gateway.ids(request) == toy_generate(prompt_of(9), params(60), SPEC)[1:]


async def test_a_prefill_that_makes_no_progress_is_given_up(tmp_path):
    config = DecodeConfig(queue_timeout_s=0.2)
    async with running_parts(tmp_path, config=config) as parts:
        parts.prefill.finish.clear()
        parts.ask(prompt_of(9), params(10))
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].code is FailureCode.TIMED_OUT
        await parts.at_base()


async def test_a_restarted_pool_node_is_found_again(tmp_path):
    async with running_parts(tmp_path) as parts:
        prompt, sampling = prompt_of(9), params(120)
        running = parts.ask(prompt, sampling)
        await eventually(lambda: running in parts.gateway.tokens)
        parts.prefill.finish.clear()
        waiting = parts.ask(prompt_of(5), params(10))
        await eventually(lambda: len(parts.prefill.slots) == 2)
        await eventually(lambda: parts.pool.stats().num_reserved == 0)
        old = parts.pool.ref
        await parts.pool.stop()
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].attempt.request == waiting
        assert parts.gateway.failures[0].code is FailureCode.POOL_LOST
        await parts.start_pool()
        await eventually(lambda: parts.conductor.registrations[-1].ref.pool == parts.pool.ref)
        assert parts.pool.ref != old
        parts.prefill.finish.set()
        parts.ask(prompt_of(5), params(10), counter=waiting.counter, attempt=2)
        for request, one, how in ((running, prompt, sampling), (waiting, prompt_of(5), params(10))):
            await parts.gateway.finished(request)
            assert parts.gateway.ids(request) == toy_generate(one, how, SPEC)[1:]
        await parts.at_base()


class FailingEngine(ToyEngine):
    """Raises in its third step."""

    num_steps = 0

    def step(self, sequences, layer_done=None):
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("no more memory")
        return super().step(sequences, layer_done)


async def test_an_engine_error_fails_the_step_and_not_the_worker(tmp_path):
    async with running_parts(tmp_path, engine=FailingEngine(SPEC, 64)) as parts:
        request = parts.ask(prompt_of(9), params(10))
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].code is FailureCode.ENGINE_ERROR
        await parts.at_base()
        again = parts.ask(prompt_of(9), params(10))
        await parts.gateway.finished(again)
        assert parts.gateway.ids(again) == toy_generate(prompt_of(9), params(10), SPEC)[1:]
        assert len(parts.gateway.ids(request)) == 2


async def test_reports_and_registration(tmp_path):
    async with running_parts(tmp_path) as parts:
        request = parts.ask(prompt_of(9), params(120))
        await eventually(
            lambda: any(r.decode and r.decode.num_running == 1 for r in parts.conductor.reports)
        )
        assert parts.conductor.registrations[0].ref == parts.worker.ref
        parts.worker.drain()
        refused = parts.ask(prompt_of(9), params(4))
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].attempt.request == refused
        assert parts.gateway.failures[0].code is FailureCode.DRAINING
        await parts.gateway.finished(request)
        await eventually(lambda: parts.conductor.reports[-1].draining)


def mixed() -> PrefillBatcher:
    return PrefillBatcher(max_chunk_tokens=8, max_chunk_requests=4, block_size=SPEC.block_size)


async def test_a_coupled_worker_computes_prompts_beside_decoding(tmp_path):
    config = DecodeConfig(max_chunk_tokens=8)
    async with running_parts(tmp_path, config=config, coupled=mixed()) as parts:
        prompts = [prompt_of(1 + 5 * i, 10 * i) for i in range(6)]
        sampling = params(16, logprobs=1, prompt_logprobs=1)
        requests = [parts.ask(prompt, sampling, coupled=True) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            await parts.gateway.finished(request)
            assert parts.gateway.ids(request) == toy_generate(prompt, sampling, SPEC)
            first, *others = parts.gateway.tokens[request]
            assert first.stats is not None
            assert first.stats.computed_tokens == len(prompt)
            assert [about.chosen.token_id for about in first.prompt_logprobs] == prompt[1:]
            assert all(token.stats is None for token in others)
            assert all(token.prompt_logprobs == () for token in others)
            assert all(token.logprobs is not None for token in (first, *others))
        await parts.at_base()


@pytest.mark.parametrize(("length", "reusable"), [(20, 16), (21, 20)])
async def test_a_coupled_worker_reuses_what_it_and_the_pool_know(tmp_path, length, reusable):
    """The last known token is computed always, so a whole number of blocks gives one less."""
    async with running_parts(tmp_path, coupled=mixed()) as parts:
        prompt, sampling = prompt_of(length), params(6)
        known = {"nothing": (0, 0), "paged cache": (reusable, 0), "pool": (0, reusable)}
        for name in ("nothing", "paged cache", "pool"):
            if name == "pool":
                # Others push the prompt out of the paged cache, but not out of the pool.
                for first in (20, 21):
                    other = parts.ask(prompt_of(200, first), params(2), coupled=True)
                    await parts.gateway.finished(other)
            request = parts.ask(prompt, sampling, coupled=True)
            await parts.gateway.finished(request)
            assert parts.gateway.ids(request) == toy_generate(prompt, sampling, SPEC), name
            stats = parts.gateway.tokens[request][0].stats
            assert stats is not None
            reused = (stats.cached_local_tokens, stats.cached_pool_tokens)
            assert reused == known[name]
            assert stats.computed_tokens == length - sum(reused)
            await parts.at_base()


async def test_a_coupled_worker_goes_on_without_a_pool_node(tmp_path):
    async with running_parts(tmp_path, coupled=mixed()) as parts:
        await parts.pool.stop()
        request = parts.ask(prompt_of(21), params(6), coupled=True)
        await parts.gateway.finished(request)
        assert parts.gateway.ids(request) == toy_generate(prompt_of(21), params(6), SPEC)
        await parts.start_pool()


async def test_a_corrupt_block_is_reported_and_never_decoded_from(tmp_path):
    async with running_parts(tmp_path) as parts:
        parts.prefill.finish.clear()
        prompt = prompt_of(9)
        request = parts.ask(prompt, params(6))
        await eventually(lambda: parts.pool.stats().num_committed == 3)
        client = await parts.pool_client()
        handle = parts.prefill.slots[0].slots[1].handle
        client.slot(handle)[5] ^= 1
        parts.prefill.finish.set()
        await eventually(lambda: len(parts.gateway.failures) == 1)
        assert parts.gateway.failures[0].code is FailureCode.POOL_LOST
        assert parts.worker.stats()["corrupt_blocks_total"] == 1
        await parts.at_base()
        parts.ask(prompt, params(6), counter=request.counter, attempt=2)
        await parts.gateway.finished(request)
        assert parts.gateway.ids(request) == toy_generate(prompt, params(6), SPEC)[1:]
        await client.close()


async def test_a_gateway_speaks_for_its_own_requests_only(tmp_path):
    async with running_parts(tmp_path) as parts:
        message = parts.request(prompt_of(5), params(5))
        stranger = AttemptId(RequestId(Incarnation("another"), 1), 1)
        parts.gateway.post(replace(message, attempt=stranger))
        assert parts.gateway.conn is not None
        conn = parts.gateway.conn
        await eventually(lambda: conn.closed)
        assert parts.worker.state.attempts() == ()


async def fetch_from_another_node(parts: Parts, num_there: int, *, coupled: bool) -> RequestId:
    """Ask for 21 tokens; sources promise 5 blocks at another node, which has `num_there`."""
    node = await parts.start_pool_node("n1")
    client = await parts.pool_client(node)
    prompt, sampling = prompt_of(21), params(6)
    hashes = extend_block_hashes(ROOT, prompt, SPEC.block_size)
    if num_there:
        await put_blocks(client, hashes[:num_there], compute_blocks(prompt)[:num_there])
    message = parts.request(prompt, sampling, coupled=coupled)
    message = replace(message, sources=(BlockSource(node.ref, 0, 5),))
    parts.gateway.post(message)
    request = message.attempt.request
    await parts.gateway.finished(request)
    expected = toy_generate(prompt, sampling, SPEC)
    assert parts.gateway.ids(request) == expected[0 if coupled else 1 :]
    await parts.at_base()
    await client.close()
    await node.stop()
    return request


@pytest.mark.parametrize("num_there", [0, 3, 5])
async def test_what_sources_name_is_fetched_and_the_rest_written_by_prefill(tmp_path, num_there):
    async with running_parts(tmp_path) as parts:
        await fetch_from_another_node(parts, num_there, coupled=False)
        written = {slot.index for message in parts.prefill.slots for slot in message.slots}
        assert written == set(range(num_there, 6))


@pytest.mark.parametrize("num_there", [0, 3, 5])
async def test_a_coupled_worker_fetches_what_sources_name(tmp_path, num_there):
    async with running_parts(tmp_path, coupled=mixed()) as parts:
        request = await fetch_from_another_node(parts, num_there, coupled=True)
        stats = parts.gateway.tokens[request][0].stats
        assert stats is not None
        assert stats.cached_pool_tokens == num_there * SPEC.block_size
        assert stats.computed_tokens == 21 - num_there * SPEC.block_size


async def test_a_gateway_that_connects_anew_has_lost_what_it_asked_before(tmp_path):
    async with running_parts(tmp_path) as parts:
        old = parts.gateway.conn
        assert old is not None
        parts.ask(prompt_of(9), params(120))
        await eventually(lambda: parts.worker.state.attempts() != ())
        await parts.gateway.connect(parts.worker)
        request = parts.ask(prompt_of(9), params(5))
        await parts.gateway.finished(request)
        await parts.at_base()
        old.close()
        await old.wait_closed()
        again = parts.ask(prompt_of(9), params(5))
        await parts.gateway.finished(again)


class GatedEngine(ToyEngine):
    """Waits in each step for `gate`."""

    def __init__(self) -> None:
        super().__init__(SPEC, 64)
        self.gate = threading.Event()
        self.num_steps = self.num_layers = 0

    def step(self, sequences, layer_done=None):
        def counted(layer):
            self.num_layers += 1
            layer_done(layer)

        self.num_steps += 1
        assert self.gate.wait(60)
        return super().step(sequences, counted)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("how", ["cancel", "newer attempt", "gateway lost"])
async def test_work_stops_within_a_layer_and_blocks_stay_until_then(tmp_path, how, coupled):
    engine = GatedEngine()
    chunks = mixed() if coupled else None
    async with running_parts(tmp_path, engine=engine, coupled=chunks) as parts:
        request = parts.ask(prompt_of(9), params(120), coupled=coupled)
        await eventually(lambda: engine.num_steps == 1)
        assert parts.gateway.conn is not None
        match how:
            case "cancel":
                parts.gateway.post(CancelDecode(AttemptId(request, 1)))
            case "newer attempt":
                parts.prefill.finish.clear()
                parts.ask(prompt_of(9), params(5), counter=request.counter, attempt=2)
            case _:
                parts.gateway.conn.close()
        await eventually(lambda: AttemptId(request, 1) not in parts.worker.state.attempts())
        assert parts.worker.stats()["kv_blocks_in_use"] == 3
        engine.gate.set()
        await eventually(lambda: parts.worker.stats()["kv_blocks_in_use"] == 0)
        assert (engine.num_steps, engine.num_layers) == (1, 1)
        assert request not in parts.gateway.tokens


async def test_blocks_are_loaded_while_a_step_runs(tmp_path):
    engine = GatedEngine()
    async with running_parts(tmp_path, engine=engine) as parts:
        first = parts.ask(prompt_of(9), params(5))
        await eventually(lambda: engine.num_steps == 1)
        second = parts.ask(prompt_of(17, 30), params(5))
        await eventually(lambda: parts.worker.stats()["requests_running"] == 2)
        assert engine.num_steps == 1
        assert parts.worker.stats()["step_running_seconds"] > 0
        engine.gate.set()
        for request, prompt in ((first, prompt_of(9)), (second, prompt_of(17, 30))):
            await parts.gateway.finished(request)
            assert parts.gateway.ids(request) == toy_generate(prompt, params(5), SPEC)[1:]
