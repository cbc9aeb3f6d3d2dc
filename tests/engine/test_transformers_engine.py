"""The real engine on tiny random models: exactly the tokens of `generate`, however it is driven."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, FalconConfig, GptOssConfig, LlamaConfig, Phi3Config

from core.errors import ConfigError, InvariantError
from core.requests import SamplingParams
from engine.attention import ATTENTION_NAME
from engine.base import SampleRequest, SequenceStep, StepAbandoned
from engine.model_checks import ModelRefused
from engine.model_probe import check_config, probe_layers
from engine.transformers_engine import TransformersEngine
from tests.engine.tiny_models import CONFIGS, VOCAB, build, greedy, save

BLOCK_SIZE = 4
NEW_TOKENS = 8
PROMPT_LENGTHS = (1, 4, 15, 41, 70)


class Loaded:
    """One architecture: the reference model, its folder, prompts, and what `generate` gives."""

    def __init__(self, name, folder):
        self.model = build(CONFIGS[name])
        self.folder = save(self.model, folder)
        generator = torch.Generator().manual_seed(1)
        self.prompts = [
            torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            for length in PROMPT_LENGTHS
        ]
        self.expected = [greedy(self.model, prompt, NEW_TOKENS) for prompt in self.prompts]

    def engine(self, isa="auto", **changes):
        settings = {"block_size": BLOCK_SIZE, "num_blocks": 256, "max_model_len": 200}
        return TransformersEngine(self.folder, isa=isa, **{**settings, **changes})


@pytest.fixture(scope="module", autouse=True)
def own_cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def loaded(request, tmp_path_factory, own_cache_folder):
    return Loaded(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory, own_cache_folder):
    return Loaded("llama", tmp_path_factory.mktemp("llama"))


class Request:
    """One generation, driven chunk by chunk; `token_log` is prompt and output."""

    def __init__(self, prompt, block_ids, computed=0):
        self.prompt = prompt
        self.output = []
        self.block_ids = block_ids
        self.computed = computed

    def next_step(self, chunk):
        token_log = [*self.prompt, *self.output]
        part = token_log[self.computed : self.computed + chunk]
        sample = None
        if self.computed + len(part) == len(token_log):
            params = SamplingParams(max_tokens=NEW_TOKENS)
            sample = SampleRequest(params, self.prompt, tuple(self.output))
        return SequenceStep(part, self.computed, self.block_ids, sample)

    def take(self, step, result):
        self.computed += len(step.token_ids)
        assert (result.token_id is None) == (step.sample is None)
        if result.token_id is not None:
            self.output.append(result.token_id)


def drive(engine, requests, chunks):
    """Run all requests to their end, `chunks[i]` prompt tokens a step, those under way together."""
    while under_way := [
        (request, request.next_step(chunk))
        for request, chunk in zip(requests, chunks, strict=True)
        if len(request.output) < NEW_TOKENS
    ]:
        results = engine.step([step for _, step in under_way])
        for (request, step), result in zip(under_way, results, strict=True):
            request.take(step, result)
    return [request.output for request in requests]


def shuffled_tables(count, num_blocks=256, seed=0):
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    share = num_blocks // count
    return [order[index * share : (index + 1) * share] for index in range(count)]


@pytest.mark.parametrize("isa", ["auto", "none"])
@pytest.mark.parametrize("chunks", [(999,) * 5, (7, 4, 3, 5, 16), (1, 2, 15, 40, 1)], ids=str)
def test_mixed_batches_in_any_chunks_give_the_tokens_of_generate(loaded, isa, chunks):
    engine = loaded.engine(isa)
    tables = shuffled_tables(len(loaded.prompts))
    requests = [Request(p, t) for p, t in zip(loaded.prompts, tables, strict=True)]
    assert drive(engine, requests, chunks) == loaded.expected


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_logprobs_are_those_of_the_plain_forward(loaded, isa):
    engine = loaded.engine(isa)
    prompt = loaded.prompts[-1]
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([prompt])).logits[0]
    expected = logits.double().log_softmax(-1)
    found = []
    for start in range(0, len(prompt), 30):
        part, following = prompt[start : start + 30], prompt[start + 1 : start + 31]
        step = SequenceStep(part, start, range(40), prompt_logprobs=2, next_token_ids=following)
        (result,) = engine.step([step])
        assert len(result.prompt_logprobs) == len(following)
        found += result.prompt_logprobs
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        row = expected[position]
        assert entry.chosen.token_id == prompt[position + 1]
        assert math.isclose(entry.chosen.logprob, row[entry.chosen.token_id], abs_tol=1e-3)
        assert [top.token_id for top in entry.top] == row.topk(2).indices.tolist()


def test_blocks_moved_to_another_engine_continue_exactly(loaded):
    first, second = loaded.engine(), loaded.engine(num_blocks=64)
    prompt = loaded.prompts[3]
    here, there = list(range(50, 100)), list(range(30, 10, -1))
    request = Request(prompt, here)
    step = request.next_step(999)
    request.take(step, first.step([step])[0])
    used = -(-len(prompt) // BLOCK_SIZE)
    for source, target in zip(here[:used], there, strict=False):
        second.write_block(target, first.read_block(source))
    request.block_ids = there
    assert drive(second, [request], [1]) == [loaded.expected[3]]


def test_a_reused_prefix_changes_nothing(loaded):
    engine = loaded.engine()
    prompt = loaded.prompts[4]
    table = list(range(100, 140))
    drive(engine, [Request(prompt, table)], [999])
    again = Request(prompt, [*table[:10], *range(30)], computed=10 * BLOCK_SIZE)
    assert drive(engine, [again], [999]) == [loaded.expected[4]]


def test_tells_of_each_layer_once_when_its_slices_are_final(loaded):
    engine = loaded.engine()
    seen = []

    def layer_done(layer):
        seen.append((layer, bytes(engine.read_slice(7, layer))))

    engine.step([SequenceStep(loaded.prompts[3], 0, range(5, 40))], layer_done)
    assert [layer for layer, _ in seen] == list(range(engine.spec.num_layers))
    assert b"".join(data for _, data in seen) == bytes(engine.read_block(7))
    assert any(seen[-1][1])


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_after_an_abandoned_step_the_engine_goes_on_exactly(loaded, isa):
    engine = loaded.engine(isa)
    announced = []

    def layer_done(layer):
        announced.append(layer)
        raise StepAbandoned

    tables = shuffled_tables(len(loaded.prompts))
    requests = [Request(p, t) for p, t in zip(loaded.prompts, tables, strict=True)]
    with pytest.raises(StepAbandoned):
        engine.step([request.next_step(999) for request in requests], layer_done)
    assert announced == [0]
    assert drive(engine, requests, [999] * len(requests)) == loaded.expected


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_neighbours_do_not_change_a_sequence(llama, isa):
    engine = llama.engine(isa)
    wanted = SamplingParams(max_tokens=4, logprobs=3)
    tables = shuffled_tables(3)
    steps = [
        SequenceStep(prompt, 0, table, SampleRequest(wanted, prompt, ()))
        for prompt, table in zip(llama.prompts[2:], tables, strict=True)
    ]
    together = engine.step(steps)
    for step, beside in zip(steps, together, strict=True):
        (alone,) = engine.step([replace(step, block_ids=range(200, 256))])
        assert alone.token_id == beside.token_id
        assert alone.logprobs is not None
        assert beside.logprobs is not None
        for one, other in zip(alone.logprobs.top, beside.logprobs.top, strict=True):
            assert one.token_id == other.token_id
            assert math.isclose(one.logprob, other.logprob, abs_tol=1e-5)


def test_reads_are_views_and_writes_are_whole_blocks(llama):
    engine = llama.engine()
    spec = engine.spec
    data = bytes(range(256)) * (spec.block_bytes // 256)
    view = engine.read_block(3)
    engine.write_block(3, memoryview(data))
    assert view == data  # the same memory
    assert view.readonly
    size = spec.layer_slice_bytes
    assert engine.read_slice(3, 1) == data[size : 2 * size]
    assert not any(engine.read_block(2))
    assert not any(engine.read_block(4))
    engine.zero_block(3)
    assert not any(view)
    with pytest.raises(ValueError, match="bytes"):
        engine.write_block(3, memoryview(data)[:-1])
    for block_id in (-1, 256):
        with pytest.raises(IndexError):
            engine.read_block(block_id)


def test_describes_the_model(llama):
    spec = llama.engine().spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (2, 2, 8)
    assert (spec.kv_dtype, spec.kv_itemsize, spec.vocab_size) == ("float32", 4, VOCAB)
    assert spec.eos_token_ids == (2,)
    assert spec.fingerprint == llama.engine("none").spec.fingerprint


def test_half_precision_runs_and_nearly_agrees(llama):
    engine = llama.engine(dtype="bfloat16")
    assert engine.isa == "none"
    assert engine.spec.kv_itemsize == 2
    prompt = llama.prompts[3]
    step = SequenceStep(prompt, 0, range(20), prompt_logprobs=0, next_token_ids=prompt[1:])
    (result,) = engine.step([step])
    with torch.inference_mode():
        expected = llama.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    gaps = [
        abs(entry.chosen.logprob - float(expected[position, entry.chosen.token_id]))
        for position, entry in enumerate(result.prompt_logprobs)
    ]
    assert sum(gaps) / len(gaps) < 0.3


def test_bad_steps_and_a_closed_engine_are_refused(llama):
    engine = llama.engine()
    assert engine.step([]) == []
    with pytest.raises(InvariantError):
        engine.step([SequenceStep([5] * 9, 0, [0, 1])])
    with pytest.raises(InvariantError):
        engine.step([SequenceStep([5], 0, [256])])
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step([SequenceStep([5], 0, [0])])


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"max_model_len": 513}, "512"),
        ({"dtype": "int4"}, "int4"),
        ({"isa": "mmx"}, "mmx"),
    ],
)
def test_settings_that_cannot_work_are_refused(llama, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        llama.engine(**changes)


def test_a_rope_that_changes_with_the_batch_is_refused():
    llama = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    phi = Phi3Config(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        }
    )
    for config, name in ((llama, "dynamic"), (phi, "longrope")):
        with pytest.raises(ModelRefused, match=name):
            check_config(config)


def tiny(config):
    model = build(config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}


def test_models_whose_attention_is_of_another_kind_are_refused_by_name():
    sinks = GptOssConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                         num_local_experts=2, num_experts_per_tok=1)  # fmt: skip
    with pytest.raises(ModelRefused, match="s_aux"):
        probe_layers(tiny(sinks))
    latent = DeepseekV3Config(**SMALL, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8,
                              kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
                              first_k_dense_replace=1)  # fmt: skip
    with pytest.raises(ModelRefused, match="different sizes"):
        probe_layers(tiny(latent))
    for alibi in (False, True):  # no step reaches its attention; its bias is added to the mask
        falcon = FalconConfig(**SMALL, num_attention_heads=2, multi_query=True, alibi=alibi)
        with pytest.raises(ModelRefused, match="falcon cannot use a paged KV cache"):
            probe_layers(tiny(falcon))


def test_a_layer_that_hides_its_window_or_its_attention_is_refused():
    model = tiny(CONFIGS["gemma3"])
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelRefused, match="layer 1"):
        probe_layers(model)
    uneven = tiny(CONFIGS["llama"])
    uneven.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelRefused, match="not every layer"):
        probe_layers(uneven)
