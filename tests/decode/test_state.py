"""`DecodeState` in a world of random orders: the right tokens, and nothing left behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages.to_gateway import FailureCode
from tests.decode.world import SPEC, World, params


def prompt_of(world: World, length: int) -> list[int]:
    return [world.random.randrange(1, SPEC.vocab_size) for _ in range(length)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_every_order_of_events_gives_the_right_tokens(seed, lengths):
    world = World(seed)
    world.loss_rate, world.exhaustion_rate, world.corruption_rate = 0.05, 0.1, 0.02
    for counter, length in enumerate(lengths):
        world.submit(counter, prompt_of(world, length), params(world.random.randint(1, 12)))
    world.run()
    world.check_outputs()
    world.check_all_over()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_everybody_finishes_when_blocks_run_out(seed):
    world = World(seed, num_blocks=20)
    for counter in range(6):
        length = world.random.randint(1, 12)
        world.submit(counter, prompt_of(world, length), params(world.random.randint(20, 60)))
    world.run()
    world.check_outputs()
    world.check_all_over()
    assert {f.code for f in world.failures} <= {FailureCode.PREEMPTED}
    most = max((f.attempt.attempt for f in world.failures), default=0)
    assert most <= 5
