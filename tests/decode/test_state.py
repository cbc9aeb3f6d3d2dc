"""`DecodeState` in a world of random orders: the right tokens, and nothing left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import DecodeConfig
from core.hashing import split_hashes
from core.ids import AttemptId, Incarnation, SlotHandle
from core.messages.to_decode import PrefillFinished
from core.messages.to_gateway import FailureCode
from core.messages.to_pool import AlreadyCommitted, LeasedBlock, SlotReserved, SlotsExhausted
from core.messages.to_prefill import SlotForBlock
from decode import events as ev
from decode.state import DecodeState
from engine.base import SequenceResult
from engine.toy import toy_generate
from prefill.batcher import PrefillBatcher
from tests.decode.world import OTHER_POOL, POOL, PREFILL, SPEC, World, make_request, params

SEEDS = st.integers(0, 2**32)


def prompt_of(world: World, length: int) -> list[int]:
    return [world.random.randrange(1, SPEC.vocab_size) for _ in range(length)]


def batcher() -> PrefillBatcher:
    return PrefillBatcher(max_chunk_tokens=8, max_chunk_requests=4, block_size=SPEC.block_size)


def check(world: World) -> None:
    world.run()
    world.check_outputs()
    world.check_all_over()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, coupled=st.booleans(), lengths=st.lists(st.integers(1, 20), max_size=6))
def test_every_order_of_events_gives_the_right_tokens(seed, coupled, lengths):
    world = World(seed, chunks=batcher() if coupled else None)
    world.loss_rate, world.exhaustion_rate, world.corruption_rate = 0.05, 0.1, 0.02
    for counter, length in enumerate(lengths):
        world.submit(counter, prompt_of(world, length), params(world.random.randint(1, 12)))
    check(world)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, coupled=st.booleans())
def test_everybody_finishes_when_blocks_run_out(seed, coupled):
    world = World(seed, num_blocks=20, chunks=batcher() if coupled else None)
    for counter in range(6):
        length = world.random.randint(1, 12)
        world.submit(counter, prompt_of(world, length), params(world.random.randint(20, 60)))
    check(world)
    assert {f.code for f in world.failures} <= {FailureCode.PREEMPTED}
    # A reserve of 4^k blocks each reaches the worst case of all at k = 3.
    assert all(f.attempt.attempt <= 3 for f in world.failures)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, coupled=st.booleans(), num_events=st.integers(1, 150))
def test_losing_the_pool_at_any_moment_costs_no_token(seed, coupled, num_events):
    world = World(seed, num_blocks=24, chunks=batcher() if coupled else None)
    for counter in range(4):
        world.submit(counter, prompt_of(world, 10), params(world.random.randint(1, 20)))
    for _ in range(num_events):
        world.step_one()
    world.lose_pool()
    check(world)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, coupled=st.booleans(), num_events=st.integers(0, 120), how=st.integers(0, 3))
def test_whatever_ends_an_attempt_at_any_moment_leaves_nothing(seed, coupled, num_events, how):
    world = World(seed, num_blocks=24, chunks=batcher() if coupled else None)
    world.retry = False
    requests = [world.submit(counter, prompt_of(world, 10), params(20)) for counter in range(4)]
    for _ in range(num_events):
        world.step_one()
    match how:
        case 0:
            for request in requests:
                world.handle(ev.Cancelled(AttemptId(request, 1)))
            assert world.state.attempts() == ()
        case 1:
            world.handle(ev.GatewayLost(requests[0].gateway))
            assert world.state.attempts() == ()
        case 2:
            world.handle(ev.PrefillLost(PREFILL.incarnation))
        case _:
            world.now_s += 1000
            world.handle(ev.TimePassed())
    world.run()
    world.check_all_over()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, coupled=st.booleans(), num_events=st.integers(0, 120))
def test_what_is_cancelled_costs_the_others_no_token(seed, coupled, num_events):
    world = World(seed, num_blocks=64, chunks=batcher() if coupled else None)
    for first in (0, 4):  # the second four get blocks that the first four left half-written
        requests = [
            world.submit(counter, prompt_of(world, 10), params(world.random.randint(1, 20)))
            for counter in range(first, first + 4)
        ]
        for _ in range(num_events):
            world.step_one()
        num_cancelled = world.random.randint(1, 4)
        for request in requests[:num_cancelled]:
            world.handle(ev.Cancelled(AttemptId(request, 1000)))
        world.run()
        for request in requests[num_cancelled:]:
            assert world.outputs[request] == toy_generate(*world.prompts[request], SPEC)
    world.check_all_over()


# --- single steps -------------------------------------------------------------------------------


def slot(number: int) -> SlotHandle:
    return SlotHandle(0, number, POOL.incarnation, 1)


class Steps:
    """A state with a pool node, and the actions of each event."""

    def __init__(self, config: DecodeConfig | None = None, num_blocks: int = 16) -> None:
        self.state = DecodeState(config or DecodeConfig(), SPEC, num_blocks)
        self.now_s = 0.0
        self(ev.PoolConnected(POOL))

    def __call__(self, event: ev.Event) -> list[ev.Action]:
        actions = self.state.handle(event, self.now_s)
        self.state.validate()
        return actions


def test_a_fetch_that_comes_back_short_is_filled_by_prefill():
    steps = Steps()
    request = make_request(list(range(1, 15)), [], params(5), num_fetched=2)
    first, second, third = split_hashes(request.block_hashes)
    attempt = request.attempt
    assert steps(ev.RequestReceived(request)) == [
        ev.FetchPrefix(attempt, OTHER_POOL, 0, (first, second)),
        ev.ReserveSlots(attempt, (2, 3), (third,), num_private=1),
    ]
    here = LeasedBlock(slot(2), 22)
    assert steps(
        ev.SlotsReserved(attempt, (2, 3), (AlreadyCommitted(here), SlotReserved(slot(3))))
    ) == [ev.SendDecodeSlots(attempt, PREFILL, (SlotForBlock(3, slot(3)),))]
    assert steps(ev.PrefixFetched(attempt, 0, 2, (LeasedBlock(slot(0), 20),))) == [
        ev.ReserveSlots(attempt, (1,), (second,), num_private=0)
    ]
    assert steps(ev.SlotsReserved(attempt, (1,), (SlotReserved(slot(1)),))) == [
        ev.SendDecodeSlots(attempt, PREFILL, (SlotForBlock(1, slot(1)),))
    ]
    finished = ev.FirstTokenReceived(PREFILL.incarnation, PrefillFinished(attempt, 7, False))
    assert steps(finished) == []
    assert steps(ev.CommitsReceived(attempt, (LeasedBlock(slot(3), 23),))) == []
    release, load = steps(ev.CommitsReceived(attempt, (LeasedBlock(slot(1), 21),)))
    assert release == ev.SendRelease(attempt, PREFILL)
    assert isinstance(load, ev.LoadBlocks)
    assert [block.leased.checksum for block in load.blocks] == [20, 21, 22, 23]
    close, run = steps(ev.BlocksLoaded(attempt))
    assert close == ev.CloseTransfer(attempt)
    assert isinstance(run, ev.RunStep)
    assert (run.sequences[0].token_ids, run.sequences[0].start) == ((7,), 14)


@pytest.mark.parametrize("num_full", [1, 2])
@pytest.mark.parametrize("num_tail", [0, 1, 3])
def test_exactly_one_private_slot_for_a_tail(num_full, num_tail):
    length = num_full * SPEC.block_size + num_tail
    request = make_request(list(range(1, length + 1)), [], params(5))
    (reserve,) = Steps()(ev.RequestReceived(request))
    assert isinstance(reserve, ev.ReserveSlots)
    assert len(reserve.block_hashes) == num_full
    assert reserve.num_private == (num_tail > 0)


def test_a_first_token_may_overtake_its_request_and_comes_from_the_right_worker():
    steps = Steps()
    request = make_request([1, 2, 3, 4], [], params(5))
    finished = PrefillFinished(request.attempt, 7, False)
    steps(ev.FirstTokenReceived(Incarnation("stranger"), finished))
    steps(ev.RequestReceived(request))
    committed = (AlreadyCommitted(LeasedBlock(slot(0), 1)),)
    assert steps(ev.SlotsReserved(request.attempt, (0,), committed)) == [
        ev.SendDecodeSlots(request.attempt, PREFILL, ())
    ]
    early = make_request([1, 2, 3, 4], [], params(5), counter=2)
    finished = PrefillFinished(early.attempt, 7, False)
    steps(ev.FirstTokenReceived(PREFILL.incarnation, finished))
    steps(ev.RequestReceived(early))
    actions = steps(ev.SlotsReserved(early.attempt, (0,), committed))
    assert ev.SendRelease(early.attempt, PREFILL) in actions


def test_a_full_queue_and_what_never_fits_are_refused_at_once():
    steps = Steps(DecodeConfig(max_queued_requests=1))
    requests = [make_request([1, 2], [], params(5), counter=i) for i in range(2)]
    steps(ev.RequestReceived(requests[0]))
    (refused,) = steps(ev.RequestReceived(requests[1]))
    assert isinstance(refused, ev.SendFailure)
    assert refused.code is FailureCode.QUEUE_FULL
    fits, never = (
        make_request([1, 2], [], params(16 * 4 - 2 + 1 + more), counter=3 + more) for more in (0, 1)
    )
    for request, code in ((fits, FailureCode.QUEUE_FULL), (never, FailureCode.NEVER_FITS)):
        (refused,) = steps(ev.RequestReceived(request))
        assert isinstance(refused, ev.SendFailure)
        assert refused.code is code


def test_blocks_that_the_paged_cache_still_has_are_not_loaded_again():
    steps = Steps()
    loads: list[int] = []
    for counter in range(2):
        request = make_request(list(range(1, 11)), [], params(5), counter=counter)
        attempt = request.attempt
        steps(ev.RequestReceived(request))
        finished = PrefillFinished(attempt, 7, False)
        steps(ev.FirstTokenReceived(PREFILL.incarnation, finished))
        here = tuple(AlreadyCommitted(LeasedBlock(slot(i), i)) for i in range(3))
        *_, load = steps(ev.SlotsReserved(attempt, (0, 1, 2), here))
        assert isinstance(load, ev.LoadBlocks)
        loads.append(len(load.blocks))
        steps(ev.BlocksLoaded(attempt))
        steps(ev.Cancelled(attempt))
        steps(ev.StepComputed((SequenceResult(3),)))
    assert loads == [3, 1]


def test_a_full_pool_is_asked_again_until_the_deadline():
    steps = Steps(DecodeConfig(handoff_timeout_s=5))
    request = make_request([1, 2], [], params(5))
    (reserve,) = steps(ev.RequestReceived(request))
    exhausted = ev.SlotsReserved(request.attempt, (0,), (SlotsExhausted(),))
    assert steps(exhausted) == []
    steps.now_s = 4
    assert steps(ev.TimePassed()) == [reserve]
    assert steps(exhausted) == []
    steps.now_s = 6
    assert reserve in steps(ev.TimePassed())
    close, *_ = steps(exhausted)
    assert close == ev.CloseTransfer(request.attempt)
    assert steps.state.attempts() == ()


def test_the_same_events_give_the_same_actions():
    def history(seed: int) -> list[object]:
        world = World(seed, num_blocks=20)
        for counter in range(4):
            world.submit(counter, prompt_of(world, 9), params(30))
        world.run()
        return [*world.tokens, *world.failures, world.num_steps]

    assert history(3) == history(3)
