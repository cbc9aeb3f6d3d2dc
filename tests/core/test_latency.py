from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.latency import LatencyProfile, PrefillPart

# Llama-70B on 8 A800s, from the table of published profiles.
A800 = LatencyProfile("llama-70b-8xa800", 32.0, 0.1012, 1.85e-6, 17.5, 0.0815, 2.47e-5)
counts = st.integers(0, 100_000)


def test_prefill_by_hand():
    assert A800.prefill_ms(1000) == pytest.approx(32.0 + 101.2 + 1.85e-6 * 500_000)
    # 7,000 new tokens after 1,000 cached ones: 7e6 pairs with the past, 24.5e6 among themselves.
    assert A800.prefill_ms(7000, 1000) == pytest.approx(32.0 + 708.4 + 1.85e-6 * 31.5e6)


def test_decode_by_hand():
    assert A800.decode_ms(16, 160_000) == pytest.approx(17.5 + 1.304 + 3.952)


def test_a_batch_pays_its_base_once():
    parts = [PrefillPart(100, 50), PrefillPart(10)]
    alone = A800.prefill_ms(100, 50) + A800.prefill_ms(10)
    assert A800.prefill_batch_ms(parts) == pytest.approx(alone - 32.0)


def test_a_mixed_step_pays_the_decode_base_alone():
    parts = [PrefillPart(100, 50)]
    apart = A800.prefill_batch_ms(parts) + A800.decode_ms(3, 400)
    assert A800.step_ms(parts, 3, 400) == pytest.approx(apart - 32.0)


def test_nothing_takes_no_time():
    assert A800.prefill_ms(0, 500) == 0
    assert A800.prefill_batch_ms([]) == 0
    assert A800.decode_ms(0, 0) == 0
    assert A800.step_ms([PrefillPart(0, 7)], 0, 0) == 0


@given(st.integers(1, 100_000), counts, st.integers(1, 100_000))
def test_chunks_cost_as_much_as_the_whole_but_for_their_bases(first, cached, second):
    whole = A800.prefill_ms(first + second, cached)
    chunks = A800.prefill_ms(first, cached) + A800.prefill_ms(second, cached + first)
    assert chunks == pytest.approx(whole + A800.prefill_base_ms)


@given(st.integers(1, 100_000), counts)
def test_a_cached_token_is_cheaper_than_a_new_one(new, cached):
    assert A800.prefill_ms(new, cached) <= A800.prefill_ms(new + cached)


def test_json_round_trip():
    assert LatencyProfile.from_json(json.loads(json.dumps(A800.to_json()))) == A800


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_base_ms": -1.0},
        {"decode_base_ms": math.nan},
        {"decode_base_ms": math.inf},
        {"decode_base_ms": "17"},
        {"decode_base_ms": True},
        {"unknown_ms": 1.0},
    ],
)
def test_bad_profiles_are_refused(change):
    [name] = change
    with pytest.raises(ValueError, match=name):
        LatencyProfile.from_json({**A800.to_json(), **change})


def test_a_missing_coefficient_is_named():
    raw = A800.to_json()
    del raw["prefill_pair_ms"]
    with pytest.raises(ValueError, match="prefill_pair_ms"):
        LatencyProfile.from_json(raw)
