"""Random histories: invariants hold, answers make sense, the same events give the same actions."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import ConductorConfig
from scheduler.conductor import Conductor
from scheduler.events import Place, PlacementRequested, Reject
from scheduler.policies import POLICIES
from tests.scheduler.cases import Cluster
from tests.scheduler.story import Story


class CheckedCluster(Cluster):
    """Checks every placement against what the cluster looked like when it was made."""

    def handle(self, event):
        view = self.conductor.view
        known = view.assignments.get(event.request.attempt.request) if self._asks(event) else None
        actions = super().handle(event)
        if self._asks(event):
            (action,) = actions
            assert isinstance(action, Place | Reject)
            assert action.correlation == event.correlation
            if isinstance(action, Place):
                self.check_placement(event.request, action.placement)
            else:
                late = known is not None and known.attempt.attempt > event.request.attempt.attempt
                over = view.has_ended(event.request.attempt)
                none = view.routes(event.request.needs_decode, ()) is None
                assert late or over or none or action.rejection.overloaded
        return actions

    @staticmethod
    def _asks(event) -> bool:
        return isinstance(event, PlacementRequested)

    def check_placement(self, request, placement):
        view = self.conductor.view
        workers = [ref for ref in (placement.prefill, placement.decode) if ref is not None]
        assert workers
        for ref in workers:
            assert view.workers[ref.incarnation].ref == ref
            assert not view.workers[ref.incarnation].draining
        if request.needs_decode:
            assert placement.decode is not None
        assigned = view.assignments[request.attempt.request]
        assert set(assigned.workers) == {ref.incarnation for ref in workers}
        self.check_sources(request, placement)
        assert placement.predicted_ttft_s >= 0

    def check_sources(self, request, placement):
        next_block = 0
        for source in placement.sources:
            assert source.first == next_block
            assert source.count > 0
            next_block += source.count
            assert self.conductor.view.pools[source.pool.incarnation].ref == source.pool
            held = self.conductor.directory.match(request.block_hashes[: 32 * next_block])
            assert held[source.pool.incarnation] >= next_block, "it holds the whole range"
        assert next_block * 10 < request.num_tokens


CONFIGS = [{"policy": policy} for policy in POLICIES] + [
    {"policy": "kvcache-centric", "ttft_slo_s": 0.3, "tbt_slo_s": 0.05}
]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CONFIGS))
def test_random_histories_keep_every_invariant(seed, config):
    cluster = CheckedCluster(**config)
    Story(Random(seed), cluster).run(200)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_events_give_the_same_actions(config):
    cluster = CheckedCluster(**config)
    Story(Random(5), cluster).run(1500)
    assert sum(isinstance(a, Place) for batch in cluster.actions for a in batch) > 100
    again = Conductor(cluster.conductor.config, 1)
    assert [again.handle(event) for event in cluster.events] == cluster.actions


def test_another_seed_gives_other_random_placements():
    cluster = Cluster(policy="random")
    Story(Random(5), cluster).run(500)
    other = Conductor(ConductorConfig(policy="random", seed=1, block_size=10), 1)
    assert [other.handle(event) for event in cluster.events] != cluster.actions
