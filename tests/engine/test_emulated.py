from __future__ import annotations

import pytest

from core.latency import LatencyProfile, PrefillPart
from core.requests import SamplingParams
from engine.base import SampleRequest, SequenceStep, StepAbandoned
from engine.emulated import EmulatedEngine, step_duration_ms
from engine.toy import toy_generate, toy_spec

SPEC = toy_spec(block_size=4)
PROFILE = LatencyProfile("test", 8.0, 0.5, 0.01, 4.0, 2.0, 0.1)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=1)


def test_tokens_are_the_toy_models_and_time_is_spread_over_the_layers():
    story: list[tuple[str, float]] = []
    engine = EmulatedEngine(SPEC, 8, PROFILE, lambda s: story.append(("slept", s)))
    step = SequenceStep(PROMPT, 0, [0, 1], SampleRequest(PARAMS, PROMPT, []))
    [result] = engine.step([step], lambda layer: story.append(("done", layer)))
    assert [result.token_id] == toy_generate(PROMPT, PARAMS, SPEC)
    layer_s = PROFILE.prefill_ms(5) / 1000 / SPEC.num_layers
    assert story == [
        pair for n in range(SPEC.num_layers) for pair in (("slept", layer_s), ("done", n))
    ]


def test_it_sleeps_without_a_listener_too():
    slept: list[float] = []
    engine = EmulatedEngine(SPEC, 8, PROFILE, slept.append)
    engine.step([SequenceStep(PROMPT, 0, [0, 1])])
    assert sum(slept) * 1000 == pytest.approx(PROFILE.prefill_ms(5))


def test_a_layer_is_in_the_cache_when_it_is_announced_and_time_has_passed():
    slept: list[float] = []
    engine = EmulatedEngine(SPEC, 8, PROFILE, slept.append)

    def layer_done(layer: int) -> None:
        assert len(slept) == layer + 1
        assert any(engine.read_slice(0, layer))
        assert not any(engine.read_block(0)[(layer + 1) * SPEC.layer_slice_bytes :])

    engine.step([SequenceStep(PROMPT[:4], 0, [0])], layer_done)
    assert len(slept) == SPEC.num_layers


def test_an_abandoned_step_sleeps_no_more():
    slept: list[float] = []
    engine = EmulatedEngine(SPEC, 8, PROFILE, slept.append)

    def layer_done(layer: int) -> None:
        raise StepAbandoned

    with pytest.raises(StepAbandoned):
        engine.step([SequenceStep(PROMPT, 0, [0, 1])], layer_done)
    assert len(slept) == 1 < SPEC.num_layers


def test_steps_cost_what_the_profile_says():
    chunk = SequenceStep([1] * 6, 10, [0] * 4)
    first = SequenceStep([1], 0, [0])
    decodes = [SequenceStep([1], 20, [0] * 6), SequenceStep([1], 1, [0])]
    assert step_duration_ms(PROFILE, [chunk, first]) == PROFILE.prefill_batch_ms(
        [PrefillPart(6, 10), PrefillPart(1, 0)]
    )
    assert step_duration_ms(PROFILE, decodes) == PROFILE.decode_ms(2, 21 + 2)
    assert step_duration_ms(PROFILE, [*decodes, chunk]) == PROFILE.step_ms(
        [PrefillPart(6, 10)], 2, 23
    )
    assert step_duration_ms(PROFILE, []) == 0
