"""The state machine alone: each rule once, then random lives with every byte watched."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import AttemptId, Incarnation, WorkerRef
from core.messages.to_conductor import BlockSource
from core.messages.to_gateway import FailureCode
from core.messages.to_prefill import SlotForBlock
from core.requests import FinishReason, SamplingParams
from prefill import events as ev
from prefill.push import MAX_TRIES
from tests.prefill.driver import (
    BLOCK,
    DECODE,
    GATEWAY,
    LAYERS,
    LOCAL_DECODE,
    OTHER,
    OWN,
    TOKEN,
    Driver,
    name,
    work,
)


def tokens(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def kinds(actions) -> list[str]:
    return [type(action).__name__ for action in actions]


def cached(driver: Driver, attempt) -> tuple[int, int]:
    stats = driver.seen.tokens[attempt].stats
    assert stats is not None
    return stats.cached_local_tokens, stats.cached_pool_tokens


# --- computing and caching ---


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK])
def test_at_least_the_last_token_is_computed_again(length):
    driver = Driver()
    for counter in (1, 2):
        driver.request(name(counter), tokens(length), decode=None)
        driver.run()
    assert cached(driver, name(1)) == (0, 0)
    assert cached(driver, name(2)) == ((length - 1) // BLOCK * BLOCK, 0)
    assert driver.state.idle


def test_the_hit_stops_at_the_first_gap_and_at_what_may_be_reused():
    driver = Driver()
    driver.request(name(1), tokens(17), decode=None)
    driver.run()
    driver.request(name(2), tokens(8) + tokens(9, 50), decode=None)
    driver.request(name(3), tokens(17), decode=None, reusable=1)
    driver.request(name(4), tokens(17), decode=None, reusable=0)
    driver.run()
    assert [cached(driver, name(i))[0] for i in (2, 3, 4)] == [8, 4, 0]


def test_identical_prompts_wait_for_the_one_that_computes():
    driver = Driver()
    for counter in range(1, 4):
        driver.request(name(counter), tokens(17), decode=None)
    driver.run()
    assert [cached(driver, name(i))[0] for i in (1, 2, 3)] == [0, 16, 16]


def test_when_the_one_that_computes_is_cancelled_another_goes_on():
    driver = Driver()
    driver.request(name(1), tokens(17), decode=None)
    driver.request(name(2), tokens(17), decode=None)
    assert driver.state.load.num_waiting == 1
    driver.do(ev.Cancelled(name(1)))
    assert driver.state.load.num_waiting == 0  # at once, though the cancelled chunk still runs
    driver.run()
    assert list(driver.seen.tokens) == [name(2)]


def test_the_prefix_comes_from_the_paged_cache_then_the_own_node_then_a_source():
    driver = Driver()
    whole = work(name(9), tokens(17))
    driver.learn(whole)
    driver.request(name(1), tokens(5), decode=None)  # one block in the paged cache
    driver.run()
    driver.pool_blocks = {
        OWN.incarnation: set(whole.block_hashes[:2]),
        OTHER.incarnation: set(whole.block_hashes),
    }
    driver.do(ev.PoolConnected(OWN))
    source = BlockSource(OTHER, 0, 3)
    driver.request(name(2), tokens(17), sources=(source,), decode=LOCAL_DECODE)
    lease, fetch = driver.waiting[0], driver.answer()[0]
    assert lease == ev.LeasePrefix(name(2), whole.block_hashes[1:4])
    assert fetch == ev.FetchPrefix(name(2), OTHER, whole.block_hashes[2:3])
    driver.run()
    assert cached(driver, name(2)) == (4, 8)


@pytest.mark.parametrize("good", [0, 1])
def test_a_broken_block_shortens_the_prefix(good):
    driver = Driver()
    whole = work(name(9), tokens(13))
    driver.learn(whole)
    driver.pool_blocks = {OWN.incarnation: set(whole.block_hashes)}
    driver.do(ev.PoolConnected(OWN))
    driver.request(name(1), tokens(13), decode=LOCAL_DECODE)
    driver.answer()
    driver.answer(ok=False, good=good)
    driver.run()
    assert cached(driver, name(1)) == (0, good * BLOCK)
    assert driver.state.totals.num_broken_blocks == 1


def test_without_an_answer_of_the_pool_everything_is_computed():
    driver = Driver()
    driver.do(ev.PoolConnected(OWN))
    driver.request(name(1), tokens(13))
    driver.answer(ok=False)
    driver.run()
    assert cached(driver, name(1)) == (0, 0)


def test_prompt_logprobs_ask_for_every_next_prompt_token():
    driver = Driver()
    params = SamplingParams(max_tokens=5, prompt_logprobs=2)
    driver.request(name(1), tokens(10), decode=None, reusable=0, params=params)
    driver.run()
    first, second = driver.steps
    assert (first.next_token_ids, second.next_token_ids) == (tokens(8, 1), (9,))
    assert first.prompt_logprobs == 2 and first.sample is None


def test_a_continued_request_samples_after_prompt_and_output():
    driver = Driver()
    params = SamplingParams(max_tokens=5, prompt_logprobs=1)
    driver.request(name(1, 2), tokens(7), num_output_tokens=3, params=params)
    (step,) = driver.steps
    assert step.sample is not None
    assert step.sample.prompt_token_ids == tokens(4)
    assert step.sample.output_token_ids == tokens(3, 4)
    assert step.prompt_logprobs is None
    driver.run()
    assert driver.seen.tokens[name(1, 2)].seq == 3


def test_the_tail_block_is_cleared_first():
    driver = Driver()
    assert kinds(driver.request(name(1), tokens(6)))[:2] == ["ZeroBlock", "RunChunk"]
    assert "ZeroBlock" not in kinds(driver.request(name(2), tokens(8, 50)))


# --- blocks go out ---


def test_each_layer_leaves_while_the_next_one_is_computed():
    driver = Driver()
    driver.slots(name(1), [0, 1])  # before the request itself
    driver.request(name(1), tokens(6))
    driver.answer()  # the begin
    written = []
    for _ in range(LAYERS):
        driver.layer()
        action = driver.waiting[0]
        assert isinstance(action, ev.WriteBlocks)
        written.append([(p.layer, len(p.handles)) for p in action.slices])
        driver.answer()
    assert written == [[(layer, 2)] for layer in range(LAYERS)]
    assert kinds(driver.waiting) == ["CommitBlocks"]
    assert driver.chunk is not None  # all of that before the step even returned


def test_slots_that_come_late_get_everything_at_once():
    driver = Driver()
    driver.request(name(1), tokens(6))
    driver.run()
    assert not driver.state.idle
    driver.slots(name(1), [0, 1])
    driver.answer()
    action = driver.waiting[0]
    assert isinstance(action, ev.WriteBlocks)
    assert [part.layer for part in action.slices] == list(range(LAYERS))
    driver.run()
    assert len(driver.over) == 2
    driver.do(ev.Released(name(1), LOCAL_DECODE.incarnation))
    assert not driver.state.idle  # it is another decode worker's request
    driver.do(ev.Released(name(1), DECODE.incarnation))
    assert driver.state.idle


def test_a_repeated_message_writes_nothing_twice():
    driver = Driver()
    driver.request(name(1), tokens(6))
    driver.run()
    driver.slots(name(1), [0, 1])
    begin = next(a for a in driver.actions if isinstance(a, ev.BeginWrites))
    driver.run()
    slots = tuple(SlotForBlock(index, handle) for index, handle in enumerate(begin.handles))
    again = driver.do(ev.DecodeSlotsReceived(name(1), DECODE.incarnation, OTHER, slots))
    assert kinds(again) == ["SendPrefillFinished"]


def test_full_blocks_are_published_at_the_own_node_when_decode_is_elsewhere():
    driver = Driver()
    driver.do(ev.PoolConnected(OWN))
    driver.request(name(1), tokens(10))
    driver.run()
    assert driver.pool_blocks[OWN.incarnation] == set(driver.works[name(1)].block_hashes)
    assert len(driver.works[name(1)].block_hashes) == 2


def test_nothing_is_published_twice_when_decode_is_on_this_host():
    driver = Driver()
    driver.do(ev.PoolConnected(OWN))
    driver.request(name(1), tokens(10), decode=LOCAL_DECODE)
    driver.run()
    assert "ReserveOwnSlots" not in kinds(driver.actions)


def test_blocks_are_kept_until_the_write_is_over():
    driver = Driver()
    driver.slots(name(1), [0])
    driver.request(name(1), tokens(6))
    driver.answer()
    driver.layer()
    assert kinds(driver.waiting) == ["WriteBlocks"]
    actions = driver.do(ev.Cancelled(name(1)))
    assert kinds(actions) == ["SendPrefillGone", "AbandonChunk"]
    driver.abandon_chunk()
    assert not driver.state.idle
    assert kinds(driver.answer()) == ["EndWrites"]
    assert driver.state.idle


def test_a_lost_pool_node_ends_the_push_and_new_slots_start_another():
    driver = Driver()
    driver.request(name(1), tokens(6))
    driver.run()
    driver.slots(name(1), [0, 1])
    driver.answer()
    driver.answer(ok=False)
    assert not driver.waiting and not driver.seen.failures
    driver.slots(name(1), [0, 1], at=OWN)
    driver.run()
    assert len([h for h in driver.over if h.incarnation == OWN.incarnation]) == 2


def lose_connection(driver: Driver) -> None:
    begin = driver.waiting.pop()
    assert isinstance(begin, ev.BeginWrites)
    driver.do(ev.WritesFailed(begin.attempt, begin.pool.incarnation))


def test_slots_whose_connection_failed_before_they_were_begun_are_tried_again():
    """Their node knows no writer, so nobody would tell the decode worker until they expire."""
    driver = Driver()
    driver.request(name(1), tokens(6))
    driver.run()
    driver.slots(name(1), [0, 1])
    for _ in range(MAX_TRIES - 1):
        lose_connection(driver)
        assert not driver.waiting
        driver.do(ev.TimedOut())
        assert kinds(driver.waiting) == ["BeginWrites"]
    driver.run()
    assert len([h for h in driver.over if h.incarnation == OTHER.incarnation]) == 2


def test_a_node_that_never_takes_the_slots_is_given_up():
    driver = Driver()
    driver.request(name(1), tokens(6))
    driver.run()
    driver.slots(name(1), [0, 1])
    for _ in range(MAX_TRIES):
        lose_connection(driver)
        driver.do(ev.TimedOut())
    assert not driver.waiting


# --- first token and ends ---


def test_a_request_finished_by_its_first_token_is_pushed_no_further():
    driver = Driver()
    driver.slots(name(1), [0, 1])
    params = SamplingParams(max_tokens=5, stop_token_ids=(TOKEN,))
    driver.request(name(1), tokens(6), params=params)
    while driver.chunk is not None:
        driver.layer()
    token = driver.seen.tokens[name(1)]
    assert token.finish is FinishReason.STOP
    assert driver.seen.finished == [
        ev.SendPrefillFinished(DECODE.incarnation, name(1), TOKEN, True)
    ]
    driver.run()
    assert driver.state.idle and not any(driver.written.values())
    assert driver.seen.gone == []


def test_a_finished_request_is_still_published_for_others():
    driver = Driver()
    driver.do(ev.PoolConnected(OWN))
    driver.slots(name(1), [0, 1])
    driver.request(name(1), tokens(6), params=SamplingParams(max_tokens=1))
    driver.answer(next(a for a in driver.waiting if isinstance(a, ev.LeasePrefix)))
    driver.answer(next(a for a in driver.waiting if isinstance(a, ev.ReserveOwnSlots)))
    while driver.chunk is not None:
        driver.layer()
    driver.run()
    assert driver.pool_blocks == {OWN.incarnation: set(driver.works[name(1)].block_hashes)}
    assert driver.state.idle


def test_an_answer_for_an_attempt_that_is_over_changes_nothing():
    driver = Driver()
    driver.do(ev.PoolConnected(OWN))
    driver.request(name(1), tokens(13))
    driver.pool_blocks = {OWN.incarnation: set(driver.works[name(1)].block_hashes)}
    driver.do(ev.Cancelled(name(1)))
    assert driver.state.idle and driver.seen.closed == [name(1)]
    assert driver.answer() == []


def test_tokens_of_one_step_go_to_each_gateway_in_one_frame():
    driver = Driver(max_chunk_requests=4)
    second = Incarnation("gateway-2")
    driver.request(name(9), tokens(8, 90))  # keeps the engine busy while the others come
    driver.request(name(1), tokens(2, 10))
    driver.request(name(2), tokens(2, 20))
    driver.request(name(3, gateway=second), tokens(2, 30))
    driver.run()
    frames = [a for a in driver.actions if isinstance(a, ev.SendTokens)]
    assert sorted((f.gateway, len(f.tokens)) for f in frames[1:]) == [(GATEWAY, 2), (second, 1)]


def test_what_can_never_fit_or_exceeds_the_queue_is_refused():
    driver = Driver(num_blocks=4, max_queued_requests=1)
    driver.slots(name(1), [0])
    driver.request(name(1), tokens(17))
    driver.request(name(2), ())
    driver.request(name(3), tokens(65))
    driver.request(name(4), tokens(16))
    driver.request(name(5), tokens(16, 50))
    driver.request(name(6), tokens(4, 50))
    assert driver.seen.failures == {
        name(1): FailureCode.NEVER_FITS,
        name(2): FailureCode.NEVER_FITS,
        name(3): FailureCode.NEVER_FITS,
        name(6): FailureCode.QUEUE_FULL,
    }
    assert [gone.attempt for gone in driver.seen.gone] == [name(1)]
    driver.run()
    driver.do(ev.Released(name(4), DECODE.incarnation))
    driver.run()
    assert name(5) in driver.seen.tokens  # it waited for the blocks of the other


def test_a_draining_worker_finishes_what_it_has_and_takes_no_more():
    driver = Driver()
    driver.request(name(1), tokens(6), decode=None)
    driver.do(ev.DrainStarted())
    driver.request(name(2), tokens(6), decode=None)
    driver.run()
    assert driver.seen.failures == {name(2): FailureCode.DRAINING}
    assert name(1) in driver.seen.tokens


def test_a_repeated_request_changes_nothing_and_an_older_attempt_is_dropped():
    driver = Driver()
    driver.request(name(1, 2), tokens(6))
    driver.request(name(1, 2), tokens(6))
    driver.request(name(1, 1), tokens(6))
    driver.run()
    assert list(driver.seen.tokens) == [name(1, 2)]
    assert driver.state.attempts == (name(1, 2),)


def test_a_newer_attempt_ends_an_older_one():
    driver = Driver()
    driver.request(name(1, 1), tokens(6))
    driver.request(name(1, 2), tokens(6))
    driver.run()
    assert list(driver.seen.tokens) == [name(1, 2)] and driver.seen.failures == {}
    assert driver.state.attempts == (name(1, 2),)


def test_a_cancel_that_overtakes_its_request_wins():
    driver = Driver()
    driver.do(ev.Cancelled(name(1)))
    driver.request(name(1), tokens(6))
    assert driver.state.idle and driver.chunk is None


def test_a_lost_gateway_takes_only_its_own_requests_along():
    driver = Driver()
    other = Incarnation("gateway-2")
    driver.request(name(1), tokens(6))
    driver.request(name(1, gateway=other), tokens(6, 50))
    driver.do(ev.GatewayLost(GATEWAY))
    driver.run()
    assert list(driver.seen.tokens) == [name(1, gateway=other)]
    assert driver.seen.failures == {}


def test_a_lost_decode_worker_is_told_to_the_gateway_unless_it_has_released():
    driver = Driver()
    for counter in (1, 2):
        driver.request(name(counter), tokens(6, 10 * counter))
    driver.run()
    driver.do(ev.Released(name(1), DECODE.incarnation))
    driver.do(ev.DecodeLost(DECODE.incarnation))
    assert driver.seen.failures == {name(2): FailureCode.PEER_LOST}
    assert driver.state.idle


def test_a_decode_worker_that_never_takes_over_times_out():
    driver = Driver(handoff_timeout_s=5.0)
    driver.request(name(1), tokens(6))
    driver.run()
    for now_s, failures in ((4.9, {}), (5.0, {name(1): FailureCode.TIMED_OUT})):
        driver.now_s = now_s
        driver.do(ev.TimedOut())
        assert driver.seen.failures == failures
    assert driver.state.idle


def test_early_slots_expire_and_are_bounded():
    driver = Driver(handoff_timeout_s=5.0, max_queued_requests=2)
    for counter in (1, 2, 3):
        driver.slots(name(counter), [0])
    assert [gone.attempt for gone in driver.seen.gone] == [name(1)]
    driver.now_s = 6.0
    driver.do(ev.TimedOut())
    assert [gone.attempt for gone in driver.seen.gone] == [name(1), name(2), name(3)]
    assert driver.state.idle


def test_slots_for_an_attempt_that_is_over_are_answered_with_gone():
    driver = Driver()
    driver.request(name(1), tokens(6), decode=None)
    driver.run()
    driver.slots(name(1), [0])
    assert driver.seen.gone == [ev.SendPrefillGone(DECODE.incarnation, name(1))]


def test_a_request_that_breaks_the_engine_fails_alone():
    driver = Driver()
    driver.request(name(9), tokens(8, 90), decode=None)
    driver.request(name(1), tokens(2, 10), decode=None)
    driver.request(name(2), tokens(2, 20), decode=None)
    while len(driver.steps) < 3:
        driver.layer()
    driver.fail_chunk()
    assert driver.seen.failures == {}
    driver.fail_chunk()
    driver.run()
    assert driver.seen.failures == {name(1): FailureCode.ENGINE_ERROR}
    assert name(2) in driver.seen.tokens and driver.state.idle


def test_a_chunk_is_abandoned_once_all_in_it_are_over_and_leaves_nothing():
    driver = Driver()
    driver.request(name(9), tokens(8, 90), decode=None)
    driver.request(name(1), tokens(4, 10), decode=None)
    driver.request(name(2), tokens(4, 20), decode=None)
    while len(driver.steps) < 3:
        driver.layer()
    driver.layer()
    assert kinds(driver.do(ev.Cancelled(name(1)))) == []
    assert kinds(driver.do(ev.Cancelled(name(2)))) == ["AbandonChunk"]
    assert driver.state.load.free_blocks == 10
    driver.abandon_chunk()
    assert driver.state.idle and driver.seen.failures == {}
    driver.request(name(3), (*tokens(4, 10), 1), decode=None)
    driver.run()
    assert set(driver.seen.tokens) == {name(9), name(3)}
    assert cached(driver, name(3)) == (0, 0)


# --- random lives ---


class Chaos:
    """Everything that may happen, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.driver = Driver(num_blocks=10, max_queued_requests=4, handoff_timeout_s=20.0)
        whole = work(name(0), tokens(16))
        self.driver.learn(whole)
        self.driver.pool_blocks = {
            OWN.incarnation: set(whole.block_hashes[:2]),
            OTHER.incarnation: set(whole.block_hashes),
        }
        self.driver.do(ev.PoolConnected(OWN))
        self.counter = 0
        self.names = [name(1)]
        self.decode_of: dict[AttemptId, WorkerRef | None] = {}

    def step(self) -> None:
        rng, driver = self.rng, self.driver
        driver.now_s += rng.random()
        if driver.waiting and rng.random() < 0.5:
            action = rng.choice(driver.waiting)
            driver.answer(action, ok=rng.random() < 0.8, good=rng.randrange(3))
        elif driver.chunk is not None and rng.random() < 0.6:
            if driver.abandoned and rng.random() < 0.5:
                driver.abandon_chunk()
            else:
                driver.layer() if rng.random() < 0.95 else driver.fail_chunk()
        else:
            self.disturb()

    def disturb(self) -> None:
        rng, driver = self.rng, self.driver
        attempt = rng.choice(self.names[-8:])
        decode = self.decode_of.get(attempt)
        match rng.choices(range(9), weights=[20, 20, 2, 1, 1, 4, 1, 2, 3])[0]:
            case 0:
                self.new_request(attempt)
            case 1 if decode is not None:
                indices = sorted(rng.sample(range(6), rng.randint(0, 5)))
                driver.slots(attempt, indices, decode=decode, at=rng.choice([OWN, OTHER]))
            case 2:
                driver.do(ev.Cancelled(attempt))
            case 3:
                driver.do(ev.GatewayLost(attempt.request.gateway))
            case 4 if decode is not None:
                driver.do(ev.DecodeLost(decode.incarnation))
            case 5:
                driver.do(ev.PoolConnected(OWN))
            case 6:
                driver.do(ev.PoolLost())
            case 7:
                driver.now_s += rng.choice([0.0, 30.0])
                driver.do(ev.TimedOut())
            case _:
                driver.do(ev.Released(attempt, (decode or DECODE).incarnation))

    def new_request(self, attempt) -> None:
        rng = self.rng
        if rng.random() < 0.8:
            self.counter += 1
            attempt = name(self.counter)
        else:
            attempt = name(attempt.request.counter, attempt.attempt + 1)
        self.names.append(attempt)
        decode = rng.choice([None, DECODE, LOCAL_DECODE])
        self.decode_of[attempt] = decode
        shared = tokens(rng.choice([0, 4, 8, 12]))
        own = tokens(rng.randint(0 if shared else 1, 14), 100 + rng.randrange(3) * 20)
        sources = (BlockSource(OTHER, rng.randrange(2), 3),) if rng.random() < 0.5 else ()
        params = SamplingParams(max_tokens=5, stop_token_ids=(TOKEN,) if rng.random() < 0.2 else ())
        self.driver.request(
            attempt,
            shared + own,
            decode=decode,
            sources=sources,
            reusable=rng.choice([None, 0, 1]),
            params=params,
            priority=rng.choice([0, 0, 1]),
        )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_lives_never_mix_bytes_and_leave_nothing(seed):
    chaos = Chaos(seed)
    for _ in range(150):
        chaos.step()
    driver = chaos.driver
    for counter in range(1, chaos.counter + 1):
        driver.do(ev.Cancelled(name(counter, 1000)))
    driver.run()
    driver.now_s += 1000
    driver.do(ev.TimedOut())
    assert driver.state.idle
    load = driver.state.load
    assert (load.num_waiting, load.num_running, load.queued_tokens) == (0, 0, 0)
    assert load.free_blocks == 10
    sums = driver.state.totals
    assert sums.num_first_tokens == len(driver.seen.tokens)
    known = sum(len(driver.works[a].token_ids) for a in driver.seen.tokens)
    assert sums.computed_tokens + sums.cached_local_tokens + sums.cached_pool_tokens == known


def test_without_faults_every_request_gets_its_token():
    chaos = Chaos(7)
    chaos.driver = driver = Driver(num_blocks=10, max_queued_requests=100)
    for _ in range(40):
        chaos.new_request(name(1))
        for attempt in list(driver.state.attempts):
            decode = chaos.decode_of[attempt]
            if decode and attempt in driver.seen.tokens:
                driver.do(ev.Released(attempt, decode.incarnation))
    for _ in range(100):
        driver.run()
        for attempt in list(driver.state.attempts):
            decode = chaos.decode_of[attempt]
            if decode and attempt in driver.seen.tokens:
                driver.do(ev.Released(attempt, decode.incarnation))
    latest = {a.request: a for a in chaos.names[1:]}
    assert set(latest.values()) <= set(driver.seen.tokens)
    assert driver.state.idle


def test_the_same_events_give_the_same_actions():
    runs = []
    for _ in range(2):
        chaos = Chaos(42)
        for _ in range(300):
            chaos.step()
        runs.append(chaos.driver.actions)
    assert runs[0] == runs[1] and len(runs[0]) > 100
