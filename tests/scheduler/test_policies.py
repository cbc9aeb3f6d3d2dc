"""Each policy on scenarios with numbers worked out by hand."""

from __future__ import annotations

from random import Random

import pytest

from core.ids import Incarnation
from scheduler.policies import POLICIES, Candidate, PolicyState


def candidate(
    name: str,
    *,
    queue_s=0.0,
    local=0,
    local_prefill_s=1.0,
    best=0,
    best_prefill_s=1.0,
    transfer_s=0.0,
) -> Candidate:
    return Candidate(
        Incarnation(name), queue_s, local, local_prefill_s, best, best_prefill_s, transfer_s
    )


def choose(policy: str, candidates, *, threshold=2.0, state=None):
    state = state or PolicyState(Random(0), threshold)
    choice = POLICIES[policy](candidates, state)
    return choice.candidate.worker, choice.fetch, pytest.approx(choice.ttft_s)


# A prompt of 100 tokens at 10 ms a token; blocks of 10 tokens; 0.1 s to move a block.
# `a` holds 8 blocks and is busy for 2 s, `b` holds 3, `c` nothing.
A = candidate("a", queue_s=2.0, local=8, local_prefill_s=0.2, best=8, best_prefill_s=0.2)
B = candidate(
    "b", queue_s=0.3, local=3, local_prefill_s=0.7, best=8, best_prefill_s=0.2, transfer_s=0.5
)
C = candidate("c", local=0, local_prefill_s=1.0, best=8, best_prefill_s=0.2, transfer_s=0.8)


def test_algorithm_1_fetches_above_the_threshold():
    # b: 8/3 > 2, fetch: 0.5 + 0.3 + 0.2 = 1.0; c: infinity, fetch: 0.8 + 0 + 0.2 = 1.0; a: 2.2.
    assert choose("kvcache-centric", [A, B, C]) == ("b", True, 1.0)
    assert choose("kvcache-centric", [A, C, B]) == ("c", True, 1.0), "the first wins ties"


def test_algorithm_1_computes_at_or_below_the_threshold():
    # 8/3 <= 3: b computes what it lacks: 0.3 + 0.7 = 1.0.
    assert choose("kvcache-centric", [A, B], threshold=3.0) == ("b", False, 1.0)
    half = candidate("h", local=4, local_prefill_s=0.6, best=8, best_prefill_s=0.2, transfer_s=0.0)
    assert choose("kvcache-centric", [half], threshold=2.0) == ("h", False, 0.6), "not above 2"
    assert choose("kvcache-centric", [half], threshold=1.99) == ("h", True, 0.2)


def test_trap_a_a_shared_prefix_does_not_gather_everything_on_one_node():
    # Everybody's first block is on `a`; the load term sends the request to the idle worker.
    a = candidate("a", queue_s=0.5, local=1, local_prefill_s=0.9, best=1, best_prefill_s=0.9)
    b = candidate("b", best=1, local_prefill_s=1.0, best_prefill_s=0.9, transfer_s=0.1)
    assert choose("kvcache-centric", [a, b]) == ("b", True, 1.0)


def test_trap_b_it_fetches_even_where_computing_is_faster():
    # A slow link: fetching takes 5 s, computing 1 s. Exactly the paper's algorithm all the same.
    slow = candidate("s", local_prefill_s=1.0, best=8, best_prefill_s=0.2, transfer_s=5.0)
    assert choose("kvcache-centric", [slow]) == ("s", True, 5.2)
    assert choose("cache-aware-local", [slow]) == ("s", False, 1.0)


def test_trap_c_the_local_baseline_minds_the_load():
    # a: 2.0 + 0.2, b: 0.3 + 0.7, c: 0 + 1.0; without the load it would be a.
    assert choose("cache-aware-local", [A, B, C]) == ("b", False, 1.0)
    idle_a = candidate("a", local=8, local_prefill_s=0.2, best=8, best_prefill_s=0.2)
    assert choose("cache-aware-local", [idle_a, B, C]) == ("a", False, 0.2)


def test_nothing_is_fetched_when_nobody_holds_anything():
    nothing = candidate("n")
    assert choose("kvcache-centric", [nothing]) == ("n", False, 1.0)


def test_least_loaded_sees_the_queue_alone():
    assert choose("least-loaded", [A, B, C]) == ("c", False, 1.0)
    assert choose("least-loaded", [B, candidate("d", queue_s=0.3)]) == ("b", False, 1.0)


def test_round_robin_takes_each_in_turn():
    state = PolicyState(Random(0), 2.0)
    picked = [choose("round-robin", [A, B, C], state=state)[0] for _ in range(5)]
    assert picked == ["a", "b", "c", "a", "b"]


def test_random_is_seeded_and_uses_everybody():
    def run(seed):
        state = PolicyState(Random(seed), 2.0)
        return [choose("random", [A, B, C], state=state)[0] for _ in range(30)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert set(run(1)) == {"a", "b", "c"}
