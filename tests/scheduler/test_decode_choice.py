"""Decode choice and admission on small numbers."""

from __future__ import annotations

from core.ids import Incarnation
from scheduler.admission import MAX_RETRY_S, MIN_RETRY_S, check_overload
from scheduler.decode_choice import DecodeCandidate, choose_decode


def candidate(name, *, sequences=1, batch=8, free=100, needed=10, tbt_s=0.02) -> DecodeCandidate:
    return DecodeCandidate(Incarnation(name), sequences, batch, free, needed, tbt_s)


def test_the_fastest_with_memory_wins_and_the_first_wins_ties():
    slow, fast = candidate("slow", tbt_s=0.03), candidate("fast", tbt_s=0.02)
    assert choose_decode([slow, fast, candidate("same", tbt_s=0.02)]) is fast


def test_memory_comes_before_batch_room_before_speed():
    full = candidate("full", free=9, tbt_s=0.01)
    crowded = candidate("crowded", sequences=9, tbt_s=0.02)
    slow = candidate("slow", tbt_s=0.03)
    assert choose_decode([full, crowded, slow]) is slow
    assert choose_decode([full, crowded]) is crowded


def test_what_fits_nowhere_goes_where_least_is_missing():
    worse, better = candidate("worse", free=-5), candidate("better", free=4)
    assert choose_decode([worse, better]) is better
    assert better.missing_blocks == 6


def overload(ttft_s=1.0, tbt_s=0.1, ttft_slo_s=None, tbt_slo_s=None):
    return check_overload(ttft_s=ttft_s, tbt_s=tbt_s, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)


def test_no_objective_admits_everything():
    assert overload(ttft_s=1e9, tbt_s=1e9) is None


def test_objectives_are_kept_when_met_exactly():
    assert overload(ttft_slo_s=1.0, tbt_slo_s=0.1) is None


def test_too_late_a_first_token_names_the_wait():
    late = overload(ttft_s=7.0, ttft_slo_s=2.0)
    assert late is not None
    assert late.retry_after_s == 5.0
    assert "TTFT 7 s" in late.reason
    barely = overload(ttft_s=2.5, ttft_slo_s=2.0)
    assert barely is not None
    assert barely.retry_after_s == MIN_RETRY_S
    hopeless = overload(ttft_s=1e6, ttft_slo_s=2.0)
    assert hopeless is not None
    assert hopeless.retry_after_s == MAX_RETRY_S


def test_too_slow_a_batch_is_overload_too():
    slow = overload(tbt_s=0.2, tbt_slo_s=0.1)
    assert slow is not None
    assert "TBT" in slow.reason
