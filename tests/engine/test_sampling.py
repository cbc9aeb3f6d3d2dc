from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.requests import SamplingParams
from engine.base import SampleRequest
from engine.sampling import prompt_logprobs, sample, uniform

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
token_lists = st.lists(tokens, max_size=8)
logit = st.floats(-20, 20, width=32)
logit_rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)

sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(16),
    min_tokens=st.integers(0, 10),
    temperature=st.sampled_from([0.0, 1e-10, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    top_k=st.integers(0, VOCAB),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    logit_bias=st.lists(
        st.tuples(tokens, st.floats(-100, 100)), max_size=3, unique_by=lambda b: b[0]
    ).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**64),
    logprobs=st.none() | st.integers(0, VOCAB + 2),
    forced_token_ids=st.just(()) | st.lists(tokens, max_size=3).map(tuple),
)
sample_requests = st.builds(
    SampleRequest,
    params=sampling_params,
    prompt_token_ids=st.lists(tokens, min_size=1, max_size=8),
    output_token_ids=token_lists,
)


def request(prompt=(1, 2), output=(), **params) -> SampleRequest:
    return SampleRequest(SamplingParams(max_tokens=100, **params), list(prompt), list(output))


def sample_one(row, req: SampleRequest):
    return sample(torch.tensor([row], dtype=torch.float32), [req])[0]


# --- a naive reference, token by token, sharing no code with the implementation ---


def reference_scores(row: list[float], req: SampleRequest) -> list[float]:
    p, history = req.params, list(req.prompt_token_ids) + list(req.output_token_ids)
    scores = []
    for token in range(VOCAB):
        score = row[token] + sum(bias for biased, bias in p.logit_bias if biased == token)
        if token in history:
            score = score / p.repetition_penalty if score > 0 else score * p.repetition_penalty
        count = list(req.output_token_ids).count(token)
        score -= p.frequency_penalty * count
        if count:
            score -= p.presence_penalty
        scores.append(score)
    banned = set(p.stop_token_ids) if len(req.output_token_ids) < p.min_tokens else set()
    for word in p.bad_words:
        if "".join(chr(t) for t in history).endswith("".join(chr(t) for t in word[:-1])):
            banned.add(word[-1])
    if len(banned) == VOCAB:
        return scores
    return [-math.inf if token in banned else score for token, score in enumerate(scores)]


def reference_distribution(scores: list[float], p: SamplingParams) -> dict[int, float]:
    top = max(scores)
    weights = {t: math.exp((s - top) / p.temperature) for t, s in enumerate(scores)}
    weights = {t: w for t, w in weights.items() if w > 0 and w >= p.min_p}
    ranked = sorted(weights, key=lambda t: (-weights[t], t))
    if p.top_k:
        ranked = ranked[: p.top_k]
    total = math.fsum(weights[t] for t in ranked)
    kept: list[int] = []
    for token in ranked:
        kept.append(token)
        if p.top_p < 1 and math.fsum(weights[t] for t in kept) >= p.top_p * total:
            break
    total = math.fsum(weights[t] for t in kept)
    return {t: weights[t] / total for t in sorted(kept)}


@settings(max_examples=150, deadline=None)
@given(logit_rows, sample_requests)
def test_agrees_with_a_naive_reference(row, req):
    token_id, _ = sample_one(row, req)
    position = len(req.output_token_ids)
    if position < len(req.params.forced_token_ids):
        assert token_id == req.params.forced_token_ids[position]
        return
    scores = reference_scores(row, req)
    if req.params.temperature < 1e-5:
        assert scores[token_id] >= max(scores) - 1e-9
        return
    distribution = reference_distribution(scores, req.params)
    assert token_id in distribution
    below = math.fsum(p for t, p in distribution.items() if t < token_id)
    chance = uniform(req.params.seed, position)
    assert below - 1e-9 <= chance <= below + distribution[token_id] + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(logit_rows, sample_requests), min_size=1, max_size=5), st.data())
def test_rows_do_not_depend_on_their_neighbours(pairs, data):
    broken = [math.nan] * VOCAB, [-math.inf] * VOCAB, [math.inf] * VOCAB
    pairs = [*pairs, *((list(row), data.draw(sample_requests)) for row in broken)]
    pairs = data.draw(st.permutations(pairs))
    logits = torch.tensor([row for row, _ in pairs])
    before = logits.clone()
    together = sample(logits, [req for _, req in pairs])
    assert together == [sample_one(row, req) for row, req in pairs]
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert all(0 <= token_id < VOCAB for token_id, _ in together)
    for _, logprobs in together:
        if logprobs is not None:
            assert not any(math.isnan(t.logprob) for t in (logprobs.chosen, *logprobs.top))


def test_greedy_takes_the_first_of_equals_like_transformers():
    assert sample_one([0.0, 5.0, 5.0, 1.0], request())[0] == 1
    assert sample_one([0.0, 5.0, 5.0, 1.0], request(temperature=1.0, top_k=1))[0] == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-45, 5e-324, -0.0])
def test_a_tiny_temperature_is_greedy(temperature):
    row = [0.0, 1.0, 1.0000001, 0.5]
    drawn = {sample_one(row, request(temperature=temperature, seed=s))[0] for s in range(20)}
    assert drawn == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_biased_away_still_gives_a_token(temperature):
    bias = tuple((t, -100.0) for t in range(VOCAB))
    row = [float(t) for t in range(VOCAB)]
    token_id, _ = sample_one(row, request(temperature=temperature, logit_bias=bias, top_k=1))
    assert token_id == VOCAB - 1


def test_when_everything_is_banned_the_bans_are_void():
    everything = tuple((t,) for t in range(4))
    assert sample_one([0.0, 3.0, 1.0, 2.0], request(bad_words=everything))[0] == 1


def test_stop_tokens_wait_for_min_tokens_even_against_a_bias():
    row = [0.0, 1.0, 2.0]
    params = {"min_tokens": 2, "stop_token_ids": (2,), "logit_bias": ((2, 100.0),)}
    assert [sample_one(row, request(output=[1] * n, **params))[0] for n in range(4)] == [1, 1, 2, 2]


def test_a_bad_word_is_cut_off_at_its_last_token():
    row = [0.0, 0.0, 9.0, 5.0]
    word = ((0, 1, 2),)
    assert sample_one(row, request(prompt=[0, 1], bad_words=word))[0] == 3
    assert sample_one(row, request(prompt=[0], output=[1], bad_words=word))[0] == 3
    assert sample_one(row, request(prompt=[3], output=[0, 1], bad_words=word))[0] == 3
    assert sample_one(row, request(prompt=[1, 0], bad_words=word))[0] == 2
    assert sample_one(row, request(prompt=[1], bad_words=word))[0] == 2


def test_penalties_look_where_vllm_looks():
    row = [2.0, 1.9, -1.0]
    assert sample_one(row, request(prompt=[0], presence_penalty=2.0))[0] == 0
    assert sample_one(row, request(prompt=[2], output=[0], presence_penalty=2.0))[0] == 1
    assert sample_one(row, request(prompt=[0], repetition_penalty=1.5))[0] == 1
    twice = request(prompt=[2], output=[0, 0, 1], frequency_penalty=0.2)
    assert sample_one(row, twice)[0] == 1
    negative = request(prompt=[0], repetition_penalty=2.0)
    assert sample_one([-1.0, -1.5, -9.0], negative)[0] == 1


@pytest.mark.parametrize("penalty", [5e-324, 1e-308, 1e-30, 10.0])
@pytest.mark.parametrize("temperature", [2e-5, 1.0])
def test_no_penalty_makes_scores_that_cannot_be_compared(penalty, temperature):
    """A tiny one makes those seen the likeliest (of positive scores) without overflow."""
    row = [2.0, 3.0, -1.0, 0.0, -3.4e38]
    params = {"repetition_penalty": penalty, "temperature": temperature, "seed": 1}
    token_id = sample_one(row, request(prompt=[0, 1, 2, 3, 4], **params))[0]
    assert token_id in ((0, 1) if penalty < 1 else (0, 1, 2, 3))


def test_forced_tokens_come_first_and_end():
    row = [0.0, 0.0, 1.0]
    params = {"forced_token_ids": (1, 0), "min_tokens": 5, "stop_token_ids": (1,), "seed": 3}
    forced = [sample_one(row, request(output=[0] * n, **params))[0] for n in range(3)]
    assert forced == [1, 0, 2]


def test_random_numbers_are_pinned():
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 0)] == [
        0.7284642407779001,
        0.9954603412889439,
        0.12224749994620443,
        0.6689282334770972,
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_samples_follow_the_distribution():
    row = [0.0, 1.0, 2.0, -1.0]
    num_draws = 4000
    logits = torch.tensor([row] * num_draws)
    requests = [request(temperature=1.5, seed=s) for s in range(num_draws)]
    counts = Counter(token_id for token_id, _ in sample(logits, requests))
    expected = torch.softmax(torch.tensor(row) / 1.5, dim=-1).tolist()
    for token_id, probability in enumerate(expected):
        spread = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token_id] - num_draws * probability) < 4 * spread


def test_positions_of_one_seed_draw_independently():
    row = [0.0] * VOCAB
    drawn = [
        sample_one(row, request(output=[0] * n, temperature=1.0, seed=11))[0] for n in range(200)
    ]
    assert set(drawn) == set(range(VOCAB))
    again = sample(
        torch.tensor([row] * 200),
        [request(output=[3] * n, temperature=1.0, seed=11) for n in range(200)],
    )
    assert [token_id for token_id, _ in again] == drawn


@given(logit_rows, tokens, st.integers(0, VOCAB + 3))
@settings(max_examples=100, deadline=None)
def test_logprobs_are_the_raw_log_softmax(row, chosen, num_top):
    forced = request(forced_token_ids=(chosen,), logprobs=num_top, logit_bias=((0, 50.0),))
    token_id, logprobs = sample_one(row, forced)
    assert token_id == chosen and logprobs is not None
    exact = torch.log_softmax(torch.tensor(row, dtype=torch.float64), dim=-1).tolist()
    order = sorted(range(VOCAB), key=lambda t: (-row[t], t))
    assert logprobs.chosen.token_id == chosen
    assert logprobs.chosen.logprob == pytest.approx(exact[chosen], abs=1e-6)
    assert logprobs.chosen.rank == order.index(chosen) + 1
    assert [t.token_id for t in logprobs.top] == order[:num_top]
    assert [t.rank for t in logprobs.top] == list(range(1, min(num_top, VOCAB) + 1))
    for top in logprobs.top:
        assert top.logprob == pytest.approx(exact[top.token_id], abs=1e-6)


def test_logprobs_ignore_bias_penalties_and_temperature():
    row = [0.0, 2.0, 1.0]
    changed = {"logit_bias": ((0, 50.0),), "presence_penalty": 1.0, "repetition_penalty": 1.5}
    _, plain = sample_one(row, request(logprobs=3))
    token_id, logprobs = sample_one(
        row, request(output=[1], logprobs=3, temperature=1.0, seed=1, **changed)
    )
    assert plain is not None and logprobs is not None
    assert token_id == 0
    assert logprobs.top == plain.top
    assert logprobs.chosen == plain.top[2]


def test_prompt_logprobs_take_only_rows_with_a_next_token():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = prompt_logprobs(logits, [2, 0], 1)
    assert [p.chosen.token_id for p in found] == [2, 0]
    assert [p.chosen.rank for p in found] == [2, 1]
    assert [[t.token_id for t in p.top] for p in found] == [[1], [0]]


def test_rows_and_requests_must_pair_up():
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 3), [request()])
    assert sample(torch.zeros(0, 3), []) == []


def test_logprobs_do_not_change_the_token():
    row = [0.3, 0.2, math.nan, 0.1]
    plain = request()
    asking = SampleRequest(replace(plain.params, logprobs=2), [1], [])
    assert sample_one(row, plain)[0] == sample_one(row, asking)[0] == 0
