"""The Conductor: decides where every attempt runs. A pure state machine.

The life of a request here:

1. `PlacementRequested`: an older attempt of the request ends. Every prefill worker is a candidate
   with predicted queue, transfer and compute times; the policy chooses one (`policies`), then a
   decode worker is chosen by memory and predicted TBT (`decode_choice`). Objectives that would be
   missed reject a *first* attempt (`admission`); a later one has tokens out already and is placed.
2. `Place`: the workers are charged with the prediction at once (`cluster_view`).
3. `PrefillReported`: the prefill worker is discharged; estimates learn from what it took.
4. `AttemptReported`, a newer attempt, or the loss of gateway or worker ends the assignment.

All of it is soft state: registrations bring back the attempts, snapshots the directory, and
gateways repeat what ended, which wins over any worker that has not noticed yet.
The same events give the same actions: chance comes from a `Random` seeded by the configuration.
"""

from __future__ import annotations

from random import Random
from typing import assert_never

from core.config import ConductorConfig
from core.errors import ConfigError
from core.ids import Incarnation
from core.messages.to_conductor import (
    ClusterState,
    Placement,
    PlaceRequest,
    PoolEvents,
    PoolSnapshot,
    Registered,
    Rejection,
    WorkerRole,
)
from kvpool.directory import Directory
from scheduler.admission import MIN_RETRY_S, Overload, check_overload
from scheduler.candidates import Predictor, Prefixes, reusable_prefixes
from scheduler.cluster_state import describe_cluster
from scheduler.cluster_view import Assignment, ClusterView, PoolEntry, Routes
from scheduler.decode_choice import DecodeCandidate, choose_decode
from scheduler.estimates import Estimates
from scheduler.events import (
    Action,
    Admit,
    AttemptReported,
    Disconnect,
    Event,
    GatewayRegistered,
    PeerLost,
    Place,
    PlacementRequested,
    PoolEventsReceived,
    PoolNodeRegistered,
    PoolReported,
    PoolSnapshotReceived,
    PrefillReported,
    Refuse,
    Reject,
    RequestSnapshot,
    Ticked,
    WorkerRegistered,
    WorkerReported,
)
from scheduler.policies import POLICIES, Choice, PolicyState


class Conductor:
    """The scheduler of one term (`epoch`). Wants a `Ticked` every `report_interval_s`.

    Raises `ConfigError` for an unknown policy, or a timeout too short for the reports.
    """

    def __init__(self, config: ConductorConfig, epoch: int) -> None:
        if config.policy not in POLICIES:
            raise ConfigError(f"policy {config.policy!r} is none of {', '.join(POLICIES)}")
        if config.worker_timeout_s < 4 * config.report_interval_s:
            raise ConfigError("worker_timeout_s must be at least four times report_interval_s")
        self.config = config
        self.epoch = epoch
        self.view = ClusterView()
        self.directory = Directory()
        self.estimates = Estimates(config.link_bytes_per_s)
        self.num_placed = self.num_rejected = 0
        self._predictor = Predictor(self.view, self.estimates, config)
        self._policy = POLICIES[config.policy]
        self._policy_state = PolicyState(Random(config.seed), config.balancing_threshold)
        self._last_tick_s: float | None = None

    def handle(self, event: Event) -> list[Action]:
        """Take an event and return what to do about it, in order."""
        match event:
            case WorkerRegistered():
                return self._register_worker(event)
            case PoolNodeRegistered():
                return self._register_pool(event)
            case GatewayRegistered(now_s, correlation, message):
                actions = self._begin_life(now_s, correlation, message.name, message.incarnation)
                if isinstance(actions[0], Admit):
                    self.view.gateways.add(message.incarnation)
                return actions
            case WorkerReported():
                return self._note_worker_report(event)
            case PoolReported():
                return self._note_pool_report(event)
            case PoolEventsReceived(now_s, incarnation, batch):
                return self._apply_to_directory(now_s, incarnation, batch)
            case PoolSnapshotReceived(now_s, incarnation, part):
                return self._apply_to_directory(now_s, incarnation, part)
            case PlacementRequested():
                return self._place(event)
            case PrefillReported():
                return self._note_prefill_end(event)
            case AttemptReported(now_s, ended):
                self.view.note_end(ended.attempt)
                known = self.view.assignments.get(ended.attempt.request)
                if known is not None and known.attempt.attempt <= ended.attempt.attempt:
                    self.view.end(now_s, ended.attempt.request)
                    self.estimates.observe_output(ended.num_output_tokens)
                return []
            case PeerLost(now_s, incarnation):
                self._forget(now_s, incarnation)
                return []
            case Ticked(now_s):
                return self._tick(now_s)
            case _:
                assert_never(event)

    def state(self, now_s: float) -> ClusterState:
        """Describe what is known, for `halfmoon status`. Changes nothing."""
        return describe_cluster(
            self.view,
            now_s,
            epoch=self.epoch,
            policy=self.config.policy,
            num_indexed_blocks=self.directory.num_blocks,
            num_placed=self.num_placed,
            num_rejected=self.num_rejected,
            num_directory_gaps=self.directory.num_gaps,
        )

    def validate(self) -> None:
        """Re-derive every redundant index. Raises `InvariantError`."""
        self.view.validate()
        self.directory.validate()

    # --- peers ---

    def _begin_life(
        self, now_s: float, correlation: int, name: str, incarnation: Incarnation
    ) -> list[Action]:
        newer = self.view.replaced_by(name, incarnation)
        if newer is not None:
            return [Refuse(correlation, f"{name} is now {newer}")]
        actions: list[Action] = [Admit(correlation, Registered(self.epoch))]
        older = self.view.begin_life(name, incarnation)
        if older is not None:
            self._forget(now_s, older)
            actions.append(Disconnect(older, f"{name} is now {incarnation}"))
        return actions

    def _register_worker(self, event: WorkerRegistered) -> list[Action]:
        ref = event.message.ref
        actions = self._begin_life(event.now_s, event.correlation, ref.name, ref.incarnation)
        if isinstance(actions[0], Admit):
            self.view.add_worker(event.now_s, event.message)
            self.estimates.add_worker(ref.incarnation, event.message.profile)
        return actions

    def _register_pool(self, event: PoolNodeRegistered) -> list[Action]:
        message = event.message
        incarnation = message.ref.incarnation
        actions = self._begin_life(event.now_s, event.correlation, message.ref.name, incarnation)
        if isinstance(actions[0], Admit):
            self.view.pools[incarnation] = PoolEntry(
                message.ref, message.num_slots, message.slot_bytes, event.now_s, event.now_s
            )
            self.directory.add(message.ref)
        return actions

    def _forget(self, now_s: float, incarnation: Incarnation) -> None:
        """Forget a peer of any kind, and what depends on it."""
        if incarnation in self.view.workers:
            self.view.drop_worker(now_s, incarnation)
        elif self.view.pools.pop(incarnation, None) is not None:
            self.directory.drop(incarnation)
        else:
            self.view.end_gateway(now_s, incarnation)
        self.estimates.forget(incarnation)

    def _tick(self, now_s: float) -> list[Action]:
        """Drop silent peers, stale attempts; ask again for snapshots that did not come.

        Nobody is blamed for silence when it was this process that slept.
        """
        before_s = now_s - self.config.worker_timeout_s
        last_tick_s, self._last_tick_s = self._last_tick_s, now_s
        if last_tick_s is None or last_tick_s < now_s - self.config.worker_timeout_s / 2:
            return []
        silent = [
            *(i for i, worker in self.view.workers.items() if worker.last_seen_s < before_s),
            *(i for i, pool in self.view.pools.items() if pool.last_seen_s < before_s),
        ]
        actions: list[Action] = []
        for incarnation in silent:
            self._forget(now_s, incarnation)
            actions.append(Disconnect(incarnation, "no report in time"))
        self.view.end_stale(now_s, before_s)
        for incarnation, pool in self.view.pools.items():
            if pool.snapshot_asked_s is not None and pool.snapshot_asked_s < before_s:
                pool.snapshot_asked_s = now_s
                actions.append(RequestSnapshot(incarnation))
        return actions

    # --- reports ---

    def _note_worker_report(self, event: WorkerReported) -> list[Action]:
        worker = self.view.workers.get(event.incarnation)
        if worker is None:
            return []
        self.view.record_report(event.now_s, event.incarnation, event.report)
        load = event.report.decode
        if load is not None and load.num_running:
            self.estimates.observe_step(
                event.incarnation, load.num_running, load.context_tokens, load.step_s
            )
        alike = [i for i, w in self.view.workers.items() if w.role is worker.role]
        prefill = event.report.prefill
        if prefill is not None and prefill.num_running + prefill.num_waiting == 0:
            self.estimates.fade_prefill(event.incarnation, alike)
        if load is not None and load.num_running + load.num_waiting == 0:
            self.estimates.fade_decode(event.incarnation, alike)
        return []

    def _note_pool_report(self, event: PoolReported) -> list[Action]:
        pool = self.view.pools.get(event.incarnation)
        if pool is not None:
            pool.report, pool.last_seen_s = event.report, event.now_s
            for sample in event.report.links:
                self.estimates.observe_link(
                    sample.source, event.incarnation, sample.num_bytes, sample.seconds
                )
        return []

    def _apply_to_directory(
        self, now_s: float, incarnation: Incarnation, message: PoolEvents | PoolSnapshot
    ) -> list[Action]:
        pool = self.view.pools.get(incarnation)
        if pool is None:
            return []
        pool.last_seen_s = now_s
        if self.directory.apply(incarnation, message):
            pool.snapshot_asked_s = now_s
            return [RequestSnapshot(incarnation)]
        if isinstance(message, PoolSnapshot) and message.last:
            pool.snapshot_asked_s = None
        return []

    def _note_prefill_end(self, event: PrefillReported) -> list[Action]:
        ended = event.ended
        known = self.view.end_prefill(event.now_s, ended.attempt)
        if known is not None and known.prefill is not None:
            self.estimates.observe_prefill(
                known.prefill, ended.num_computed_tokens, ended.num_cached_tokens, ended.prefill_s
            )
        return []

    # --- placing ---

    def _place(self, event: PlacementRequested) -> list[Action]:
        now_s, request = event.now_s, event.request
        known = self.view.assignments.get(request.attempt.request)
        if known is not None and known.attempt.attempt > request.attempt.attempt:
            return self._reject(event, "a newer attempt was placed", None)
        if self.view.has_ended(request.attempt):
            return self._reject(event, "the attempt has ended", None)
        self.view.end(now_s, request.attempt.request)
        routes = self.view.routes(request.needs_decode, request.excluded)
        if routes is None:
            return self._reject(event, "no worker can take the request", None)
        prefixes = self._find_prefixes(request)
        choice = self._choose_prefill(now_s, request, routes, prefixes)
        decode = self._choose_decode(request, routes, choice.candidate.worker)
        if request.attempt.attempt == 1:
            overload = check_overload(
                ttft_s=choice.ttft_s,
                tbt_s=0.0 if decode is None else decode.tbt_s,
                ttft_slo_s=self.config.ttft_slo_s,
                tbt_slo_s=self.config.tbt_slo_s,
            )
            if overload is not None:
                return self._reject(event, overload.reason, overload)
        self._charge(now_s, request, choice, decode)
        return [Place(event.correlation, self._placement(choice, decode, prefixes))]

    def _find_prefixes(self, request: PlaceRequest) -> Prefixes:
        found = self.directory.match(request.block_hashes)
        return reusable_prefixes(self.view, found, request, self.config.block_size)

    def _choose_prefill(
        self, now_s: float, request: PlaceRequest, routes: Routes, prefixes: Prefixes
    ) -> Choice:
        workers = routes.coupled
        if routes.decodes or not request.needs_decode:
            workers = routes.prefills + routes.coupled
        candidates = self._predictor.prefill_candidates(now_s, request, workers, prefixes)
        return self._policy(candidates, self._policy_state)

    def _choose_decode(
        self, request: PlaceRequest, routes: Routes, prefill: Incarnation
    ) -> DecodeCandidate | None:
        """Choose the decode worker; a coupled worker is its own, even for a first token alone."""
        worker = self.view.workers[prefill]
        if worker.role is WorkerRole.COUPLED:
            return choose_decode(self._predictor.decode_candidates(request, [worker]))
        if not request.needs_decode:
            return None
        return choose_decode(self._predictor.decode_candidates(request, routes.decodes))

    def _charge(
        self, now_s: float, request: PlaceRequest, choice: Choice, decode: DecodeCandidate | None
    ) -> None:
        self.num_placed += 1
        self.view.assign(
            now_s,
            Assignment(
                attempt=request.attempt,
                placed_s=now_s,
                prefill=choice.candidate.worker,
                decode=None if decode is None else decode.worker,
                prefill_us=round(choice.prefill_s * 1e6),
                context_tokens=self._predictor.context_tokens(request),
                decode_blocks=0 if decode is None else decode.needed_blocks,
            ),
        )

    def _placement(
        self, choice: Choice, decode: DecodeCandidate | None, prefixes: Prefixes
    ) -> Placement:
        worker = self.view.workers[choice.candidate.worker]
        reused = f"{choice.prefix_blocks} blocks reused{', some fetched' if choice.fetch else ''}"
        return Placement(
            epoch=self.epoch,
            prefill=None if worker.role is WorkerRole.COUPLED else worker.ref,
            decode=None if decode is None else self.view.workers[decode.worker].ref,
            sources=self._predictor.sources(worker, choice, prefixes),
            predicted_ttft_s=choice.ttft_s,
            predicted_tbt_s=0.0 if decode is None else decode.tbt_s,
            reason=f"{self.config.policy}: {reused}",
        )

    def _reject(
        self, event: PlacementRequested, reason: str, overload: Overload | None
    ) -> list[Action]:
        if overload is not None:  # the others are asked again: their requests are not refused
            self.num_rejected += 1
        rejection = Rejection(
            epoch=self.epoch,
            reason=reason,
            overloaded=overload is not None,
            retry_after_s=MIN_RETRY_S if overload is None else overload.retry_after_s,
        )
        return [Reject(event.correlation, rejection)]
