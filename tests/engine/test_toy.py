from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.requests import SamplingParams, finish_reason
from engine.base import Engine, SampleRequest, SequenceStep, StepAbandoned
from engine.toy import ToyEngine, toy_generate, toy_spec

SPEC = toy_spec(block_size=4, vocab_size=97)
PROMPT = [5, 11, 2, 90, 33, 7, 7, 1, 64, 12, 3]
PARAMS = SamplingParams(max_tokens=9)


def table(num_tokens: int, num_blocks: int = 32, seed: int = 0) -> list[int]:
    count = math.ceil(num_tokens / SPEC.block_size)
    return random.Random(seed).sample(range(num_blocks), count)


def prefill(engine: Engine, prompt, block_ids, chunk=100, start=0) -> None:
    for at in range(start, len(prompt), chunk):
        engine.step([SequenceStep(prompt[at : at + chunk], at, block_ids)])


def go_on(engine: Engine, prompt, output, params, block_ids) -> list[int]:
    """Recompute the last known token, then decode to the end."""
    known: list[int] = list(output)
    while True:
        position = len(prompt) + len(known) - 1
        last = (list(prompt) + known)[-1]
        request = SampleRequest(params, prompt, list(known))
        [result] = engine.step([SequenceStep([last], position, block_ids, request)])
        assert result.token_id is not None
        known.append(result.token_id)
        if finish_reason(params, len(known), result.token_id) is not None:
            return known


def run(prompt=PROMPT, params=PARAMS, chunk=100, seed=0, spec=SPEC) -> list[int]:
    engine = ToyEngine(spec, 32)
    block_ids = table(len(prompt) + params.max_tokens, seed=seed)
    prefill(engine, prompt[:-1], block_ids, chunk)
    return go_on(engine, prompt, [], params, block_ids)


token = st.integers(0, SPEC.vocab_size - 1)


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(token, min_size=1, max_size=30),
    chunk=st.integers(1, 31),
    seed=st.integers(0, 99),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 5),
        temperature=st.sampled_from([0.0, 1.0]),
        stop_token_ids=st.just(()) | st.just(tuple(range(0, 90, 2))),
        seed=st.integers(0, 2**64),
        forced_token_ids=st.lists(token, max_size=3).map(tuple),
    ),
)
def test_the_engine_says_what_the_oracle_says(prompt, chunk, seed, params):
    assert run(prompt, params, chunk, seed) == toy_generate(prompt, params, SPEC)


def test_tokens_do_not_depend_on_the_block_size():
    for block_size in (1, 16, 512):
        other = toy_spec(block_size=block_size, vocab_size=97)
        assert toy_generate(PROMPT, PARAMS, other) == toy_generate(PROMPT, PARAMS, SPEC)


def test_a_batch_gives_each_what_it_gets_alone():
    engine, prompts = ToyEngine(SPEC, 64), [PROMPT, PROMPT[:3], [9], PROMPT[::-1]]
    tables = [list(range(i * 4, i * 4 + 4)) for i in range(4)]
    prefill(engine, PROMPT[:-1], tables[0])
    # One decodes, the others prefill, in the same step.
    steps = [SequenceStep(PROMPT[-1:], 10, tables[0], SampleRequest(PARAMS, PROMPT, []))]
    for prompt, block_ids in zip(prompts[1:], tables[1:], strict=True):
        steps.append(SequenceStep(prompt, 0, block_ids, SampleRequest(PARAMS, prompt, [])))
    results = engine.step(steps)
    expected = [toy_generate(prompt, PARAMS, SPEC)[0] for prompt in prompts]
    assert [result.token_id for result in results] == expected


def corrupt(engine: ToyEngine, block_ids: list[int], how: str) -> None:
    spec, first, second = engine.spec, block_ids[0], block_ids[1]
    blocks = [bytes(engine.read_block(block_id)) for block_id in (first, second)]
    size = spec.layer_slice_bytes
    match how:
        case "zeroed":
            engine.zero_block(second)
        case "stale":
            engine.write_block(first, memoryview(random.Random(1).randbytes(spec.block_bytes)))
        case "swapped":
            engine.write_block(first, memoryview(blocks[1]))
            engine.write_block(second, memoryview(blocks[0]))
        case "missing layer":
            torn = blocks[0][:-size] + bytes(size)
            engine.write_block(first, memoryview(torn))
        case "shifted":
            engine.write_block(first, memoryview(blocks[0][8:] + blocks[0][:8]))
        case "one bit":
            flipped = bytearray(blocks[1])
            flipped[len(flipped) // 2] ^= 1
            engine.write_block(second, memoryview(flipped))
        case "duplicated":
            engine.write_block(second, memoryview(blocks[0]))


@pytest.mark.parametrize(
    "how", ["zeroed", "stale", "swapped", "missing layer", "shifted", "one bit", "duplicated"]
)
def test_a_wrong_block_changes_the_answer(how):
    expected = toy_generate(PROMPT, PARAMS, SPEC)
    engine, block_ids = ToyEngine(SPEC, 32), table(20)
    prefill(engine, PROMPT[:-1], block_ids)
    corrupt(engine, block_ids, how)
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) != expected


@pytest.mark.parametrize("byte", range(0, SPEC.block_bytes, 7))
def test_every_byte_of_a_full_block_counts(byte):
    engine, block_ids = ToyEngine(SPEC, 32), table(20)
    prefill(engine, PROMPT[:-1], block_ids)
    flipped = bytearray(engine.read_block(block_ids[0]))
    flipped[byte] ^= 0x80
    engine.write_block(block_ids[0], memoryview(flipped))
    later = engine.read_block(block_ids[2])
    before = bytes(later)
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) != toy_generate(PROMPT, PARAMS, SPEC)
    # What is computed from a wrong block is wrong itself, as in a real model.
    assert bytes(later) != before
    good = ToyEngine(SPEC, 32)
    prefill(good, PROMPT, block_ids)
    assert bytes(good.read_block(block_ids[2])) != bytes(later)


def test_what_lies_behind_the_last_token_does_not_count():
    engine, block_ids = ToyEngine(SPEC, 32), table(20)
    for block_id in block_ids:
        engine.write_block(block_id, memoryview(b"\xff" * SPEC.block_bytes))
    prefill(engine, PROMPT[:-1], block_ids, chunk=3)
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) == toy_generate(PROMPT, PARAMS, SPEC)


def test_blocks_move_between_engines_byte_by_byte():
    first, second = ToyEngine(SPEC, 8), ToyEngine(SPEC, 32)
    here, there = [3, 1, 6], table(20)
    prefill(first, PROMPT, here)
    for source, target in zip(here, there, strict=False):
        slices = [bytes(first.read_slice(source, layer)) for layer in range(SPEC.num_layers)]
        assert b"".join(slices) == bytes(first.read_block(source))
        second.write_block(target, memoryview(b"".join(slices)))
    output = toy_generate(PROMPT, PARAMS, SPEC)
    assert go_on(second, PROMPT, output[:1], PARAMS, there) == output


def test_layers_are_announced_in_order_once_written():
    engine, seen = ToyEngine(SPEC, 8), []
    whole = ToyEngine(SPEC, 8)
    prefill(whole, PROMPT[:4], [2])

    def layer_done(layer: int) -> None:
        done = [bytes(engine.read_slice(2, n)) for n in range(SPEC.num_layers)]
        right = [bytes(whole.read_slice(2, n)) for n in range(SPEC.num_layers)]
        seen.append((layer, [a == b for a, b in zip(done, right, strict=True)]))

    engine.step([SequenceStep(PROMPT[:4], 0, [2])], layer_done)
    count = SPEC.num_layers
    assert seen == [(n, [m <= n for m in range(count)]) for n in range(count)]


def test_an_abandoned_step_stops_at_the_layer_and_can_be_run_again():
    engine, seen = ToyEngine(SPEC, 8), []
    block_ids = [3, 1, 6, 0, 2]

    def layer_done(layer: int) -> None:
        seen.append(layer)
        if layer == 1:
            raise StepAbandoned

    with pytest.raises(StepAbandoned):
        engine.step([SequenceStep(PROMPT[:-1], 0, block_ids)], layer_done)
    assert seen == [0, 1]
    prefill(engine, PROMPT[:-1], block_ids)
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) == toy_generate(PROMPT, PARAMS, SPEC)


def test_a_block_written_in_the_same_step_cannot_be_relied_on():
    engine = ToyEngine(SPEC, 8)
    request = SampleRequest(PARAMS, PROMPT[:5], [])
    [_, result] = engine.step(
        [SequenceStep(PROMPT[:4], 0, [0]), SequenceStep(PROMPT[4:5], 4, [0, 1], request)]
    )
    assert result.token_id != toy_generate(PROMPT[:5], PARAMS, SPEC)[0]


def test_seeds_make_a_difference_and_repeat():
    outputs = [
        tuple(run(params=SamplingParams(max_tokens=6, temperature=1.0, seed=seed)))
        for seed in (1, 2, 1)
    ]
    assert outputs[0] == outputs[2] != outputs[1]
    assert outputs[0] != tuple(run(params=SamplingParams(max_tokens=6)))


def test_stop_tokens_end_it_after_min_tokens_only():
    anything = tuple(range(96))
    params = SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=anything)
    output = run(params=params)
    assert output[:3] == [96, 96, 96]
    assert output[-1] in anything and not set(output[:-1]) & set(anything)


def test_logprobs_are_a_distribution_led_by_the_greedy_token():
    engine = ToyEngine(SPEC, 8)
    params = SamplingParams(max_tokens=1, logprobs=97)
    request = SampleRequest(params, PROMPT[:3], [])
    step = SequenceStep(PROMPT[:3], 0, [0], request, prompt_logprobs=2, next_token_ids=PROMPT[1:3])
    [result] = engine.step([step])
    assert result.logprobs is not None
    assert result.logprobs.chosen == result.logprobs.top[0]
    assert result.logprobs.chosen.token_id == result.token_id
    total = math.fsum(math.exp(one.logprob) for one in result.logprobs.top)
    assert total == pytest.approx(1.0)
    assert [one.chosen.token_id for one in result.prompt_logprobs] == PROMPT[1:3]
    for one in result.prompt_logprobs:
        assert len(one.top) == 2
        assert one.chosen.logprob == pytest.approx(-one.chosen.rank * math.log(2))


@pytest.mark.parametrize(
    "step",
    [
        SequenceStep([], 0, [0]),
        SequenceStep([1], -1, [0]),
        SequenceStep([1] * 5, 0, [0]),
        SequenceStep([1], 0, [8]),
        SequenceStep([1], 0, [-1]),
        SequenceStep([97], 0, [0]),
        SequenceStep([1], 4096, [0] * 2000),
    ],
)
def test_steps_that_break_the_contract_are_refused(step):
    with pytest.raises(ValueError):
        ToyEngine(SPEC, 8).step([step])


def test_block_access_is_checked():
    engine = ToyEngine(SPEC, 8)
    for block_id in (-1, 8):
        with pytest.raises(IndexError):
            engine.read_block(block_id)
    with pytest.raises(IndexError):
        engine.read_slice(0, SPEC.num_layers)
    with pytest.raises(ValueError):
        engine.write_block(0, memoryview(b"short"))
    with pytest.raises(TypeError):
        engine.read_block(0)[0] = 1
    with pytest.raises(ValueError, match="multiple of 8"):
        ToyEngine(toy_spec(head_dim=6), 8)


def test_closed_is_closed():
    engine = ToyEngine(SPEC, 8)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step([SequenceStep([1], 0, [0])])


def test_wider_heads_are_filled_and_counted_too():
    wide = toy_spec(block_size=4, vocab_size=97, head_dim=40, num_layers=7)
    engine, block_ids = ToyEngine(wide, 8), [4, 2, 5, 0, 1]
    prefill(engine, PROMPT[:-1], block_ids)
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) == toy_generate(PROMPT, PARAMS, wide)
    flipped = bytearray(engine.read_block(2))
    flipped[-1] ^= 1
    engine.write_block(2, memoryview(flipped))
    assert go_on(engine, PROMPT, [], PARAMS, block_ids) != toy_generate(PROMPT, PARAMS, wide)


def test_it_never_reaches_torch():
    code = "import sys, engine.emulated; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_the_toy_says_is_pinned():
    assert toy_generate(PROMPT, PARAMS, SPEC) == [90, 49, 64, 83, 24, 18, 80, 39, 50]
