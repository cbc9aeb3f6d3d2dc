"""Predictions, their corrections and bounds, and the paper's inequality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.ids import Incarnation
from scheduler.estimates import (
    FITTED_BOUND,
    MIN_SAMPLE_BYTES,
    UNKNOWN_BOUND,
    UNKNOWN_PROFILE,
    Estimates,
    reuse_break_even_bytes_per_s,
)
from tests.scheduler.cases import MS_PER_TOKEN

W, X, Y = Incarnation("w"), Incarnation("x"), Incarnation("y")


def estimates() -> Estimates:
    made = Estimates(1000.0)
    made.add_worker(W, MS_PER_TOKEN)
    made.add_worker(X, None)
    return made


@pytest.mark.parametrize(("flops_per_s", "gb_per_s"), [(8 * 312e12, 5.86), (8 * 989.4e12, 18.6)])
def test_the_papers_inequality(flops_per_s, gb_per_s):
    """Mooncake: 6 GB/s on 8xA800 and 19 GB/s on 8xH800 for LLaMA3-70B at 8,192 tokens."""
    found = reuse_break_even_bytes_per_s(
        prefix_tokens=8192, hidden_size=8192, gqa=8, value_bytes=2, flops_per_s=flops_per_s
    )
    assert found / 1e9 == pytest.approx(gb_per_s, rel=2e-3)


def test_predictions_by_hand():
    made = estimates()
    assert made.prefill_s(W, 100, 50) == pytest.approx(0.1)
    assert made.step_s(W, 2, 300) == pytest.approx(0.015)  # 10 + 2 + 3 ms
    assert made.prefill_s(X, 100, 0) == UNKNOWN_PROFILE.prefill_ms(100) / 1e3
    assert made.transfer_s(X, Y, 500) == 0.5


@pytest.mark.parametrize(("ratio", "limit"), [(3.0, 3.0), (1 / 3, 1 / 3), (1e6, FITTED_BOUND)])
def test_a_prefill_factor_approaches_what_happened_within_bounds(ratio, limit):
    made = estimates()
    made.observe_prefill(W, 100, 0, 0.1 * ratio)
    once = made.prefill_s(W, 100, 0) / 0.1
    assert min(1, limit) < once < max(1, limit)
    for _ in range(60):
        made.observe_prefill(W, 100, 0, 0.1 * ratio)
    assert made.prefill_s(W, 100, 0) / 0.1 == pytest.approx(limit, rel=1e-3)
    assert made.step_s(W, 2, 300) == pytest.approx(0.015), "the other phase has its own factor"


def test_an_unknown_worker_may_be_very_slow():
    made = estimates()
    for _ in range(100):
        made.observe_prefill(X, 100, 0, 1.0)
    assert made.prefill_s(X, 100, 0) == pytest.approx(1.0, rel=1e-3)


@given(st.lists(st.floats(-1.0, 1e12), max_size=50))
def test_nothing_observed_breaks_a_prediction(observed):
    made = estimates()
    for seconds in observed:
        for worker in (W, X):
            made.observe_prefill(worker, 100, 0, seconds)
            made.observe_prefill(worker, 0, 100, seconds)
            made.observe_step(worker, 2, 300, seconds)
    assert made.prefill_s(W, 100, 0) * 1.0001 >= 0.1 / FITTED_BOUND
    assert made.prefill_s(W, 100, 0) <= 0.1 * FITTED_BOUND * 1.0001
    assert made.step_s(X, 1, 1) <= UNKNOWN_PROFILE.decode_ms(1, 1) / 1e3 * UNKNOWN_BOUND * 1.0001


def test_links_are_measured_and_smoothed_and_directed():
    made = estimates()
    made.observe_link(X, Y, MIN_SAMPLE_BYTES - 1, 100.0)
    made.observe_link(X, Y, 10**6, 0.0)
    assert made.transfer_s(X, Y, 1000) == 1.0, "too small and impossible samples are ignored"
    made.observe_link(X, Y, 10**6, 100.0)
    assert made.transfer_s(X, Y, 10_000) == pytest.approx(1.0)
    made.observe_link(X, Y, 10**6, 10.0)  # 10,000 B/s + 0.2 * 90,000
    assert made.transfer_s(X, Y, 28_000) == pytest.approx(1.0)
    assert made.transfer_s(Y, X, 1000) == 1.0
    made.forget(Y)
    assert made.transfer_s(X, Y, 1000) == 1.0


def test_corrections_survive_a_second_registration_but_not_a_new_profile():
    made = estimates()
    made.observe_prefill(W, 100, 0, 0.2)
    corrected_s = made.prefill_s(W, 100, 0)
    made.add_worker(W, MS_PER_TOKEN)
    assert made.prefill_s(W, 100, 0) == corrected_s > 0.1
    made.add_worker(W, None)
    made.add_worker(W, MS_PER_TOKEN)
    assert made.prefill_s(W, 100, 0) == pytest.approx(0.1)


def test_output_lengths_are_learnt_and_never_exceed_the_limit():
    made = estimates()
    assert made.output_tokens(500) == 500
    made.observe_output(0)
    assert made.output_tokens(500) == 500, "an attempt without output tells nothing"
    made.observe_output(100)
    assert (made.output_tokens(500), made.output_tokens(20)) == (100, 20)
    made.observe_output(200)
    assert made.output_tokens(500) == 105
