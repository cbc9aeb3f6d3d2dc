"""Which prefill worker computes a request: plain functions, chosen by name.

A policy sees one `Candidate` per worker, in order of registration; the first wins ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from core.ids import Incarnation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could compute the prefill, with predicted times.

    The *best* prefix is the longest one on any pool node; `transfer_s` is the time to bring what
    this worker's own pool node lacks of it there.
    """

    worker: Incarnation
    queue_s: float
    local_blocks: int
    local_prefill_s: float
    best_blocks: int
    best_prefill_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker; `fetch` says that its pool node takes the best prefix from elsewhere."""

    candidate: Candidate
    fetch: bool
    ttft_s: float

    @property
    def prefix_blocks(self) -> int:
        """Blocks that need not be computed."""
        return self.candidate.best_blocks if self.fetch else self.candidate.local_blocks

    @property
    def prefill_s(self) -> float:
        """Predicted time that the worker computes."""
        return self.candidate.best_prefill_s if self.fetch else self.candidate.local_prefill_s


@dataclass(slots=True)
class PolicyState:
    """What a policy may keep between decisions, owned by the Conductor."""

    rng: Random
    balancing_threshold: float
    turn: int = 0


Policy = Callable[[Sequence[Candidate], PolicyState], Choice]
"""Chooses among at least one candidate."""


def _use_local(candidate: Candidate) -> Choice:
    return Choice(candidate, False, candidate.queue_s + candidate.local_prefill_s)


def _fetch_best(candidate: Candidate) -> Choice:
    ttft_s = candidate.transfer_s + candidate.queue_s + candidate.best_prefill_s
    return Choice(candidate, True, ttft_s)


def choose_random(candidates: Sequence[Candidate], state: PolicyState) -> Choice:
    """Any worker, whatever its load and cache."""
    return _use_local(state.rng.choice(candidates))


def choose_round_robin(candidates: Sequence[Candidate], state: PolicyState) -> Choice:
    """Each in turn, whatever its load, with the longest prefix that any pool node holds."""
    state.turn += 1
    candidate = candidates[(state.turn - 1) % len(candidates)]
    fetch = candidate.best_blocks > candidate.local_blocks
    return _fetch_best(candidate) if fetch else _use_local(candidate)


def choose_least_loaded(candidates: Sequence[Candidate], state: PolicyState) -> Choice:
    """The shortest queue in predicted seconds, whatever the cache."""
    return _use_local(min(candidates, key=lambda c: c.queue_s))


def choose_cache_aware_local(candidates: Sequence[Candidate], state: PolicyState) -> Choice:
    """The earliest first token, when every worker has only its own pool node's cache."""
    return min((_use_local(c) for c in candidates), key=lambda choice: choice.ttft_s)


def choose_kvcache_centric(candidates: Sequence[Candidate], state: PolicyState) -> Choice:
    """Algorithm 1 of Mooncake (FAST'25), exactly.

    Above the threshold it always transfers, even where computing would be faster.
    """
    choices = []
    for candidate in candidates:
        local, best = candidate.local_blocks, candidate.best_blocks
        ratio = best / local if local else inf
        fetch = best > local and ratio > state.balancing_threshold
        choices.append(_fetch_best(candidate) if fetch else _use_local(candidate))
    return min(choices, key=lambda choice: choice.ttft_s)


POLICIES: Mapping[str, Policy] = {
    "random": choose_random,
    "round-robin": choose_round_robin,
    "least-loaded": choose_least_loaded,
    "cache-aware-local": choose_cache_aware_local,
    "kvcache-centric": choose_kvcache_centric,
}
