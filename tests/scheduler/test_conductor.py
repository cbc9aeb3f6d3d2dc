"""The Conductor on small clusters: placements, sources, load, loss, restarts."""

from __future__ import annotations

import pytest

from core.config import ConductorConfig
from core.errors import ConfigError, InvariantError
from core.ids import Incarnation
from core.messages.to_conductor import (
    DecodeLoad,
    LinkSample,
    Placement,
    PoolEvents,
    PoolReport,
    PrefillLoad,
    Registered,
    RegisterGateway,
    Rejection,
    WorkerReport,
)
from core.messages.to_pool import Tier
from scheduler.cluster_view import MAX_REMEMBERED_ENDS
from scheduler.conductor import Conductor
from scheduler.events import (
    Admit,
    Disconnect,
    GatewayRegistered,
    PeerLost,
    PoolEventsReceived,
    PoolReported,
    Refuse,
    RequestSnapshot,
    Ticked,
)
from tests.scheduler.cases import (
    GATEWAY,
    IDLE,
    Cluster,
    attempt,
    hashes,
    pool_ref,
    report,
    two_by_two,
    worker_ref,
)


def ranges(placement: Placement):
    return [(s.pool.name, s.first, s.count) for s in placement.sources]


# --- placing ---


def test_a_first_placement_names_both_workers_and_the_epoch():
    cluster = two_by_two(epoch=7)
    placement = cluster.place(1, 100)
    assert placement.prefill is not None
    assert placement.decode is not None
    assert (placement.epoch, placement.prefill.name, placement.decode.name) == (
        7,
        "prefill-0",
        "decode-0",
    )
    assert placement.sources == ()
    assert placement.predicted_ttft_s == pytest.approx(0.1)
    # 10 ms + 1 sequence + 0.01 ms * (100 known + 20 / 2 to come)
    assert placement.predicted_tbt_s == pytest.approx(0.0121)


def test_load_spreads_and_is_given_back():
    cluster = two_by_two(policy="least-loaded")
    assert cluster.prefill_name(1, 100) == "prefill-0"
    assert cluster.prefill_name(2, 300) == "prefill-1"
    assert cluster.prefill_name(3, 100) == "prefill-0", "0.1 s are less than 0.3 s"
    cluster.end_prefill(2)
    assert cluster.prefill_name(4, 100) == "prefill-1"
    cluster.end(1)
    cluster.end(3)
    assert cluster.prefill_name(5, 100) == "prefill-0"


def test_the_head_of_a_queue_wears_off_with_time_and_the_rest_does_not():
    cluster = two_by_two()
    cluster.place(1, 1000)
    cluster.place(2, 800)
    cluster.place(3, 500)  # to prefill-1: 0.8 + 0.5 against 1.0 + 0.5
    view, worker = (
        cluster.conductor.view,
        cluster.conductor.view.workers[Incarnation("prefill-1-1")],
    )
    assert view.queue_s(100.0, worker) == pytest.approx(1.3)
    assert view.queue_s(100.5, worker) == pytest.approx(0.8)
    assert view.queue_s(109.0, worker) == pytest.approx(0.5)
    cluster.now_s = 101.0
    cluster.end_prefill(2, seconds=0.8)
    assert view.queue_s(101.0, worker) == pytest.approx(0.5), "the next one starts now"


def test_kvcache_centric_fetches_and_names_sources_from_block_0():
    cluster = two_by_two()
    blocks = hashes(9)
    cluster.hold(pool_ref("pool-0"), blocks[:8])
    cluster.hold(pool_ref("pool-1"), blocks[:2])
    # prefill-0: 0.02 s; prefill-1: 8 / 2 > 2, 6 blocks of 1,000 B at 10 kB/s: 0.6 + 0.02 s.
    first = cluster.place(1, 100, blocks=blocks)
    assert first.prefill is not None
    assert (first.prefill.name, ranges(first)) == ("prefill-0", [("pool-0", 0, 8)])
    assert first.predicted_ttft_s == pytest.approx(0.02)
    cluster.place(2, 1000)  # to prefill-1: 1.0 against 1.02
    cluster.place(3, 2000)  # to prefill-0: 0.02 + 2.0 against 1.0 + 2.0
    fetched = cluster.place(4, 100, blocks=blocks)
    assert fetched.prefill is not None
    assert fetched.prefill.name == "prefill-1"
    assert fetched.predicted_ttft_s == pytest.approx(1.62)
    assert ranges(fetched) == [("pool-1", 0, 2), ("pool-0", 2, 6)], "its own pool node first"


def test_least_loaded_reuses_what_is_local_alone():
    cluster = two_by_two(policy="least-loaded")
    blocks = hashes(9)
    cluster.hold(pool_ref("pool-0"), blocks[:8])
    assert ranges(cluster.place(1, 100, blocks=blocks)) == [("pool-0", 0, 8)]
    assert ranges(cluster.place(2, 100, blocks=blocks)) == []


def test_round_robin_fetches_for_the_worker_whose_turn_it_is():
    cluster = two_by_two(policy="round-robin")
    blocks = hashes(9)
    cluster.hold(pool_ref("pool-0"), blocks[:8])
    cluster.hold(pool_ref("pool-1"), blocks[:1])
    first, second = (cluster.place(i, 100, blocks=blocks) for i in (1, 2))
    workers = [p.prefill for p in (first, second)]
    assert [w and w.name for w in workers] == ["prefill-0", "prefill-1"]
    assert ranges(first) == [("pool-0", 0, 8)]
    assert ranges(second) == [("pool-1", 0, 1), ("pool-0", 1, 7)]


def test_the_last_token_is_always_computed():
    cluster = two_by_two()
    blocks = hashes(10)
    cluster.hold(pool_ref("pool-0"), blocks)
    placement = cluster.place(1, 100, blocks=blocks)
    assert ranges(placement) == [("pool-0", 0, 9)]
    assert placement.predicted_ttft_s == pytest.approx(0.01)
    assert ranges(cluster.place(2, 101, blocks=blocks)) == [("pool-0", 0, 10)]


def test_it_reads_from_the_fastest_holder():
    cluster = two_by_two()
    cluster.add_worker("prefill-2", "prefill", cluster.add_pool("pool-2"))
    blocks = hashes(8)
    for name in ("pool-0", "pool-1"):
        cluster.hold(pool_ref(name), blocks)
    sample = LinkSample(Incarnation("pool-1-1"), 10**6, 1.0)
    seen = PoolReport(0, 0, 0, 0, 0, (sample,))
    cluster.handle(PoolReported(cluster.now_s, Incarnation("pool-2-1"), seen))
    for counter in (1, 2):
        cluster.place(counter, 5000)  # keeps the first two prefill workers busy
    placement = cluster.place(3, 100, blocks=blocks)
    assert placement.prefill is not None
    assert placement.prefill.name == "prefill-2"
    assert ranges(placement) == [("pool-1", 0, 8)]
    assert placement.predicted_ttft_s == pytest.approx(0.008 + 0.02)


def test_decode_goes_by_predicted_step_time():
    cluster = two_by_two()
    names = []
    for counter, tokens in enumerate((1000, 100, 100, 100)):
        placement = cluster.place(counter, tokens)
        assert placement.decode is not None
        names.append(placement.decode.name)
    # In ms, decode-0 against decode-1: 21.1 : 21.1, 23.2 : 12.1, 23.2 : 14.2, 23.2 : 16.3.
    assert names == ["decode-0", "decode-1", "decode-1", "decode-1"]


def test_the_step_time_is_that_of_a_full_batch_and_no_larger():
    cluster = Cluster()
    pool = cluster.add_pool("pool")
    cluster.add_worker("p", "prefill", pool)
    cluster.add_worker("d", "decode", pool, max_batch=2)
    steps_s = [cluster.place(counter, 90).predicted_tbt_s for counter in range(4)]
    # 10 ms + 1 ms a sequence + 0.01 ms for each of its 90 + 20 / 2 tokens
    assert steps_s == pytest.approx([0.012, 0.014, 0.014, 0.014])


def test_decode_goes_where_memory_is():
    cluster = two_by_two()
    refs = {e.ref.name: e.ref for e in cluster.conductor.view.workers.values()}
    cluster.report(refs["decode-0"], report(free_blocks=11))  # 100 + 20 tokens take 12 blocks
    placement = cluster.place(1, 100)
    assert placement.decode == refs["decode-1"]
    cluster.report(refs["decode-1"], report(free_blocks=20))
    # decode-1: 20 free, 12 promised and not taken yet; decode-0 lacks 1 block, decode-1 lacks 4.
    assert cluster.place(2, 100).decode == refs["decode-0"]
    cluster.end_prefill(1)  # from now on the reported 20 blocks are what is left for others
    assert cluster.place(3, 100).decode == refs["decode-1"]


def test_what_can_never_fit_is_placed_all_the_same():
    cluster = Cluster()
    pool = cluster.add_pool("pool")
    cluster.add_worker("p", "prefill", pool)
    cluster.add_worker("d", "decode", pool, num_blocks=3)
    placement = cluster.place(1, 1000)
    assert placement.decode is not None, "the worker says never_fits"
    cluster.end(1)
    cluster.place(2, 10)


def test_a_request_without_decode_needs_no_decode_worker():
    cluster = Cluster()
    cluster.add_worker("p", "prefill", cluster.add_pool("pool"))
    placement = cluster.place(1, 100, needs_decode=False)
    assert placement.decode is None
    assert placement.predicted_tbt_s == 0.0
    assert isinstance(cluster.ask(2, 100), Rejection)
    cluster.end_prefill(1)
    assert cluster.conductor.view.assignments == {}


def test_a_coupled_worker_does_both():
    cluster = Cluster()
    coupled = cluster.add_worker("c", "coupled", cluster.add_pool("pool"))
    for counter, needs_decode in enumerate((True, False)):
        placement = cluster.place(counter, 100, needs_decode=needs_decode)
        assert (placement.prefill, placement.decode) == (None, coupled)
        assert placement.predicted_tbt_s > 0
    assert cluster.place(3, 100).predicted_ttft_s == pytest.approx(0.3)


def test_both_kinds_of_worker_share_the_load():
    cluster = two_by_two()
    cluster.add_worker("c", "coupled", cluster.add_pool("pool-2"))
    for counter in range(2):
        assert cluster.place(counter, 100).prefill is not None
    assert cluster.place(2, 100).prefill is None
    cluster.handle(PeerLost(cluster.now_s, Incarnation("decode-0-1")))
    cluster.handle(PeerLost(cluster.now_s, Incarnation("decode-1-1")))
    for counter in range(3, 6):
        assert cluster.place(counter, 100).prefill is None, "prefill workers have no partner"
    assert cluster.place(6, 100, needs_decode=False).prefill is not None


def test_excluded_workers_are_avoided_unless_nothing_else_is_left():
    cluster = two_by_two()
    p0, p1 = Incarnation("prefill-0-1"), Incarnation("prefill-1-1")
    d0 = Incarnation("decode-0-1")
    placement = cluster.place(1, 100, excluded=(p0, d0))
    assert placement.prefill is not None
    assert placement.decode is not None
    assert (placement.prefill.name, placement.decode.name) == ("prefill-1", "decode-1")
    placement = cluster.place(2, 100, excluded=(p0, p1, d0))
    assert placement.prefill is not None
    assert placement.decode is not None
    assert placement.decode.name == "decode-1", "the decode side still has another"


def test_a_worker_without_its_pool_node_is_avoided():
    cluster = two_by_two()
    cluster.handle(PeerLost(cluster.now_s, Incarnation("pool-0-1")))
    for counter in range(3):
        placement = cluster.place(counter, 100)
        assert placement.prefill is not None
        assert placement.decode is not None
        assert (placement.prefill.name, placement.decode.name) == ("prefill-1", "decode-1")
    cluster.handle(PeerLost(cluster.now_s, Incarnation("pool-1-1")))
    cluster.place(9, 100)


def test_a_draining_worker_gets_nothing_new():
    cluster = two_by_two()
    refs = {e.ref.name: e.ref for e in cluster.conductor.view.workers.values()}
    cluster.report(refs["prefill-0"], report(draining=True))
    cluster.report(refs["decode-0"], report(draining=True))
    for counter in range(3):
        placement = cluster.place(counter, 100)
        assert (placement.prefill, placement.decode) == (refs["prefill-1"], refs["decode-1"])
    cluster.report(refs["decode-1"], report(draining=True))
    rejection = cluster.ask(4, 100)
    assert isinstance(rejection, Rejection)
    assert not rejection.overloaded


# --- admission ---


def test_nobody_to_serve_is_no_overload():
    cluster = Cluster(epoch=4)
    rejection = cluster.ask(1, 100)
    assert isinstance(rejection, Rejection)
    assert (rejection.epoch, rejection.overloaded) == (4, False)
    assert rejection.retry_after_s > 0
    assert cluster.conductor.state(0.0).num_rejected == 0, "it will be asked again"


def test_objectives_reject_first_attempts_only_and_charge_nothing():
    cluster = two_by_two(ttft_slo_s=1.0)
    cluster.place(1, 900)
    cluster.place(2, 900)
    late = cluster.ask(3, 200)
    assert isinstance(late, Rejection)
    assert late.overloaded
    assert cluster.conductor.state(0.0).num_rejected == 1
    assert attempt(3).request not in cluster.conductor.view.assignments
    assert isinstance(cluster.ask(3, 200, number=2), Placement), "its tokens are out already"


def test_a_tbt_objective_rejects_too():
    cluster = two_by_two(tbt_slo_s=0.0125)
    cluster.place(1, 100)
    cluster.place(2, 100)
    slow = cluster.ask(3, 100)  # the second sequence makes 14.2 ms
    assert isinstance(slow, Rejection)
    assert slow.overloaded


# --- attempts ---


def test_a_newer_attempt_replaces_the_older_and_late_messages_change_nothing():
    cluster = two_by_two()
    cluster.place(1, 100)
    cluster.place(1, 100, number=2)
    assert cluster.conductor.view.assignments[attempt(1).request].attempt == attempt(1, 2)
    cluster.end_prefill(1, number=1)
    cluster.end(1, number=1)
    assert cluster.conductor.view.assignments[attempt(1).request].prefill is not None
    assert isinstance(cluster.ask(1, 100, number=1), Rejection)
    cluster.end(1, number=2)
    assert cluster.conductor.view.assignments == {}
    cluster.end(1, number=2)


def test_asking_twice_for_one_attempt_charges_once():
    cluster = two_by_two()
    assert cluster.place(1, 100) == cluster.place(1, 100)
    assert sum(w.num_assigned for w in cluster.conductor.state(0.0).workers) == 2


def test_estimates_learn_from_prefills_and_steps():
    cluster = two_by_two()
    refs = {e.ref.name: e.ref for e in cluster.conductor.view.workers.values()}
    for counter in range(40):
        cluster.place(counter, 100, excluded=(Incarnation("prefill-1-1"),))
        cluster.end_prefill(counter, seconds=0.2)
        cluster.end(counter)
    placement = cluster.place(99, 100)
    assert placement.prefill == refs["prefill-1"], "prefill-0 takes twice its profile"
    load = WorkerReport(None, DecodeLoad(0, 1, 100, 500, 0.024), False)
    for _ in range(40):
        cluster.report(refs["decode-0"], load)
    assert cluster.place(100, 100).decode == refs["decode-1"]


# --- loss and return ---


def test_a_lost_worker_takes_its_part_of_the_load_along():
    cluster = two_by_two()
    cluster.place(1, 100)
    cluster.handle(PeerLost(cluster.now_s, Incarnation("prefill-0-1")))
    known = cluster.conductor.view.assignments[attempt(1).request]
    assert (known.prefill, known.decode) == (None, "decode-0-1"), "it may be decoding already"
    cluster.handle(PeerLost(cluster.now_s, Incarnation("decode-0-1")))
    assert cluster.conductor.view.assignments == {}
    again = cluster.place(1, 100, number=2)
    assert again.prefill is not None
    assert again.prefill.name == "prefill-1"
    cluster.handle(PeerLost(cluster.now_s, Incarnation("nobody")))


def test_a_lost_gateway_takes_its_requests_along():
    cluster = two_by_two()
    other = Incarnation("gateway-2")
    cluster.place(1, 100)
    cluster.place(1, 100, gateway=other)
    message = RegisterGateway("gateway", other, pool_ref("x").address)
    assert cluster.handle(GatewayRegistered(cluster.now_s, 3, message)) == [Admit(3, Registered(1))]
    cluster.handle(PeerLost(cluster.now_s, other))
    assert list(cluster.conductor.view.assignments) == [attempt(1).request]


def test_registering_twice_changes_nothing():
    cluster = two_by_two()
    cluster.place(1, 100)
    before = cluster.conductor.state(cluster.now_s)
    ref = cluster.add_worker("prefill-0", "prefill", pool_ref("pool-0"), attempts=(attempt(1),))
    assert cluster.actions[-1] == [Admit(0, Registered(1))]
    assert cluster.conductor.state(cluster.now_s) == before
    assert cluster.place(2, 100).prefill != ref, "its queue is as long as before"


def test_a_new_life_replaces_the_old_one_which_may_not_come_back():
    cluster = two_by_two()
    cluster.place(1, 100)
    new = cluster.add_worker("prefill-0", "prefill", pool_ref("pool-0"), life=2)
    old = Incarnation("prefill-0-1")
    assert cluster.actions[-1] == [
        Admit(0, Registered(1)),
        Disconnect(old, "prefill-0 is now prefill-0-2"),
    ]
    assert old not in cluster.conductor.view.workers
    rows = {row.name: row for row in cluster.conductor.state(cluster.now_s).workers}
    assert (rows["prefill-0"].incarnation, rows["prefill-0"].restarts) == (new.incarnation, 1)
    assert rows["prefill-0"].num_assigned == 0
    cluster.add_worker("prefill-0", "prefill", pool_ref("pool-0"))
    assert cluster.actions[-1] == [Refuse(0, "prefill-0 is now prefill-0-2")]
    assert old not in cluster.conductor.view.workers
    # A life that was lost before its successor came counts as well.
    cluster.handle(PeerLost(cluster.now_s, new.incarnation))
    cluster.add_worker("prefill-0", "prefill", pool_ref("pool-0"), life=3)
    rows = {row.name: row for row in cluster.conductor.state(cluster.now_s).workers}
    assert rows["prefill-0"].restarts == 2


def test_a_restarted_pool_node_loses_its_directory_entries():
    cluster = two_by_two()
    blocks = hashes(5)
    cluster.hold(pool_ref("pool-0"), blocks)
    assert ranges(cluster.place(1, 100, blocks=blocks)) == [("pool-0", 0, 5)]
    cluster.add_pool("pool-0", life=2)
    assert ranges(cluster.place(2, 100, blocks=blocks)) == []
    assert cluster.conductor.state(0.0).num_indexed_blocks == 0


def test_a_gap_in_events_asks_for_a_snapshot_once_and_again_when_it_does_not_come():
    cluster = two_by_two()
    ref, blocks = pool_ref("pool-0"), hashes(3)
    cluster.hold(ref, [], seq=1)

    def batch(seq, added=()):
        events = PoolEvents(seq, Tier.DRAM, b"".join(added), b"")
        return cluster.handle(PoolEventsReceived(cluster.now_s, ref.incarnation, events))

    assert batch(2, blocks[:1]) == []
    assert batch(4, blocks[1:2]) == [RequestSnapshot(ref.incarnation)]
    assert batch(5) == []
    cluster.now_s += 1
    cluster.handle(Ticked(cluster.now_s))
    asked = []
    for _ in range(4):
        cluster.now_s += 1
        batch(6)
        for worker in list(cluster.conductor.view.workers.values()):
            cluster.report(worker.ref, IDLE)
        asked += cluster.handle(Ticked(cluster.now_s))
    assert asked.count(RequestSnapshot(ref.incarnation)) == 1
    cluster.hold(ref, blocks, seq=6)
    assert ranges(cluster.place(1, 100, blocks=blocks)) == [("pool-0", 0, 3)]
    assert batch(7) == []
    assert batch(9) == [RequestSnapshot(ref.incarnation)]
    assert cluster.conductor.state(0.0).num_directory_gaps == 2


def test_a_silent_peer_is_lost_unless_it_was_the_conductor_that_slept():
    cluster = two_by_two()
    loud = [w.ref for w in cluster.conductor.view.workers.values() if w.ref.name != "decode-0"]

    def second():
        cluster.now_s += 1
        for ref in loud:
            cluster.report(ref, IDLE)
        for host in (0, 1):
            seen = PoolReport(0, 0, 0, 0, 0, ())
            cluster.handle(PoolReported(cluster.now_s, Incarnation(f"pool-{host}-1"), seen))
        return cluster.handle(Ticked(cluster.now_s))

    assert [second() for _ in range(3)] == [[], [], []]
    assert second() == [Disconnect(Incarnation("decode-0-1"), "no report in time")]
    assert Incarnation("decode-0-1") not in cluster.conductor.view.workers
    cluster.now_s += 60
    assert cluster.handle(Ticked(cluster.now_s)) == []
    assert len(cluster.conductor.view.workers) == 3
    cluster.now_s += 1
    assert len(cluster.handle(Ticked(cluster.now_s))) == 5, "awake again, and still no report"


def test_an_attempt_whose_end_nobody_told_is_forgotten_when_its_workers_are_idle():
    cluster = two_by_two()
    busy = WorkerReport(None, DecodeLoad(0, 1, 100, 900, 0.01), False)

    def seconds(count, decode_report=IDLE):
        for _ in range(count):
            cluster.now_s += 1
            for worker in list(cluster.conductor.view.workers.values()):
                cluster.report(worker.ref, IDLE)
            cluster.report(worker_ref("decode-0", pool_ref("pool-0")), decode_report)
            for pool in cluster.conductor.view.pools:
                cluster.handle(PoolReported(cluster.now_s, pool, PoolReport(0, 0, 0, 0, 0, ())))
            cluster.handle(Ticked(cluster.now_s))

    seconds(10)
    register_gateway(cluster)
    cluster.place(1, 100)
    seconds(1)
    assert len(cluster.conductor.view.assignments) == 1, "the reports may be from before"
    seconds(10, busy)
    assert len(cluster.conductor.view.assignments) == 1
    seconds(3)
    assert len(cluster.conductor.view.assignments) == 1
    seconds(2)
    assert cluster.conductor.view.assignments == {}


def register_gateway(cluster, incarnation=GATEWAY):
    message = RegisterGateway("gateway", incarnation, pool_ref("x").address)
    cluster.handle(GatewayRegistered(cluster.now_s, 3, message))


def num_assigned(cluster):
    return {row.name: row.num_assigned for row in cluster.conductor.state(0.0).workers}


@pytest.mark.parametrize("gateway_first", [True, False])
def test_what_its_gateway_ended_is_not_brought_back_by_a_worker(gateway_first):
    """The message of a former Conductor's day comes again, before or after the worker's."""
    cluster = Cluster(epoch=2)
    pool = cluster.add_pool("pool-0")
    if gateway_first:
        register_gateway(cluster)
        cluster.end(1, number=2)
    for role in ("prefill", "decode", "coupled"):
        attempts = (attempt(1, 1), attempt(1, 2))
        cluster.add_worker(role, role, pool, attempts=attempts)
    if not gateway_first:
        register_gateway(cluster)
        cluster.end(1, number=2)
    assert not any(num_assigned(cluster).values())
    answer = cluster.ask(1, 100, number=2)
    assert isinstance(answer, Rejection)
    assert answer.reason == "the attempt has ended"
    assert cluster.place(1, 100, number=3).prefill is not None


def test_only_the_newest_ends_are_remembered():
    cluster = two_by_two()
    for counter in range(MAX_REMEMBERED_ENDS + 1):
        cluster.conductor.view.note_end(attempt(counter))
    assert not cluster.conductor.view.has_ended(attempt(0))
    assert cluster.conductor.view.has_ended(attempt(1))
    cluster.conductor.view.note_end(attempt(7, 3))
    cluster.conductor.view.note_end(attempt(7, 2))
    assert cluster.conductor.view.has_ended(attempt(7, 3))


def test_attempts_of_a_gateway_that_is_gone_are_forgotten_though_their_worker_is_busy():
    """Both the Conductor and the gateway died; nobody will ever report the end."""
    cluster = Cluster(epoch=2)
    pool = cluster.add_pool("pool-0")
    gone = Incarnation("gateway-gone")
    attempts = (attempt(1, gateway=gone), attempt(2))
    worker = cluster.add_worker("decode-0", "decode", pool, attempts=attempts)
    register_gateway(cluster)
    for _ in range(6):
        cluster.now_s += 1
        cluster.report(worker, report(running=2))
        cluster.handle(PoolReported(cluster.now_s, pool.incarnation, PoolReport(0, 0, 0, 0, 0, ())))
        cluster.handle(Ticked(cluster.now_s))
    assert list(cluster.conductor.view.assignments) == [attempt(2).request]


def test_a_restarted_conductor_knows_the_load_from_registrations():
    cluster = Cluster(epoch=2)
    for host in (0, 1):
        pool = cluster.add_pool(f"pool-{host}")
        attempts = (attempt(1), attempt(2)) if host == 0 else ()
        p = cluster.add_worker(f"prefill-{host}", "prefill", pool, attempts=attempts)
        d = cluster.add_worker(f"decode-{host}", "decode", pool, attempts=attempts)
        if host == 0:
            load = WorkerReport(PrefillLoad(1, 1, 5000, 10), None, False)
            cluster.report(p, load)
            running = WorkerReport(None, DecodeLoad(0, 2, 4000, 900, 0.0), False)
            cluster.report(d, running)
    rows = {row.name: row.num_assigned for row in cluster.conductor.state(0.0).workers}
    assert rows == {
        "prefill-0": 2,
        "decode-0": 2,
        "prefill-1": 0,
        "decode-1": 0,
        "pool-0": 0,
        "pool-1": 0,
    }
    placement = cluster.place(3, 100)
    assert placement.prefill is not None
    assert placement.decode is not None
    assert (placement.prefill.name, placement.decode.name) == ("prefill-1", "decode-1")
    # Ends of attempts that the older term placed are understood.
    cluster.end_prefill(1)
    cluster.end(1)
    cluster.end(2)
    rows = {row.name: row.num_assigned for row in cluster.conductor.state(0.0).workers}
    assert (rows["prefill-0"], rows["decode-0"]) == (0, 0)


def test_an_older_attempt_in_a_registration_does_not_replace_a_newer_one():
    cluster = two_by_two()
    cluster.place(1, 100, number=3)
    cluster.add_worker("prefill-1", "prefill", pool_ref("pool-1"), attempts=(attempt(1, 2),))
    assert cluster.conductor.view.assignments[attempt(1).request].attempt.attempt == 3
    restarted = two_by_two()
    pool = pool_ref("pool-0")
    restarted.add_worker("decode-0", "decode", pool, attempts=(attempt(1, 3),))
    restarted.add_worker("prefill-0", "prefill", pool, attempts=(attempt(1, 2),))
    known = restarted.conductor.view.assignments[attempt(1).request]
    assert (known.attempt, known.prefill) == (attempt(1, 3), None)


def test_messages_of_strangers_change_nothing():
    cluster = Cluster()
    stranger = pool_ref("stranger")
    cluster.hold(stranger, hashes(2))
    cluster.handle(
        PoolEventsReceived(1.0, stranger.incarnation, PoolEvents(5, Tier.DRAM, b"", b""))
    )
    cluster.handle(PoolReported(1.0, stranger.incarnation, PoolReport(0, 0, 0, 0, 0, ())))
    assert cluster.actions == [[], [], []]
    assert cluster.conductor.state(0.0).num_indexed_blocks == 0


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'clever' is none of random, round-robin"):
        Conductor(ConductorConfig(policy="clever"), 1)


def test_a_timeout_that_reports_cannot_keep_is_refused():
    with pytest.raises(ConfigError, match="four times"):
        Conductor(ConductorConfig(report_interval_s=0.5, worker_timeout_s=1.9), 1)


def test_validate_notices_a_wrong_load():
    cluster = two_by_two()
    cluster.place(1, 100)
    cluster.conductor.view.workers[Incarnation("decode-0-1")].promised_blocks += 1
    with pytest.raises(InvariantError, match="decode-0: load"):
        cluster.conductor.validate()


def test_a_decode_worker_that_looked_slow_once_gets_work_again():
    cluster = two_by_two()
    slow, fast = (worker_ref(f"decode-{i}", pool_ref(f"pool-{i}")) for i in (0, 1))
    for ref, step_s in ((slow, 0.1), (fast, 0.012)):
        for _ in range(30):
            load = DecodeLoad(0, 1, 100, 1000, step_s)
            cluster.report(ref, WorkerReport(None, load, draining=False))
    cluster.report(slow, IDLE_DECODE)

    def decode_name(counter: int) -> str:
        placement = cluster.place(counter, 100)
        assert placement.decode is not None
        return placement.decode.name

    assert [decode_name(i) for i in range(3)] == ["decode-1"] * 3
    for _ in range(40):
        cluster.report(slow, IDLE_DECODE)
    assert decode_name(4) == "decode-0", "it has nothing to do, the other has three requests"


def test_an_idle_prefill_worker_is_no_slower_than_what_is_common():
    cluster = two_by_two()
    slow = worker_ref("prefill-0", pool_ref("pool-0"))
    for _ in range(40):
        cluster.conductor.estimates.observe_prefill(slow.incarnation, 200, 0, 9.0)
    assert [cluster.prefill_name(i, 200) for i in (50, 51)] == ["prefill-1"] * 2
    cluster.end(50)
    cluster.end(51)
    for _ in range(60):
        cluster.report(slow, WorkerReport(PrefillLoad(0, 0, 0, 1000), None, draining=False))
    assert [cluster.prefill_name(i, 200) for i in (52, 53)] == ["prefill-1", "prefill-0"]


IDLE_DECODE = WorkerReport(None, DecodeLoad(0, 0, 0, 1000, 0.0), draining=False)
