"""What the Conductor knows of workers, pool nodes and the attempts it assigned. Pure bookkeeping.

One request has at most one assignment, that of its newest attempt. Each worker indexes the
requests that are assigned to it; `validate` re-derives these indexes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from core.errors import InvariantError
from core.ids import AttemptId, Incarnation, PoolRef, RequestId, WorkerRef
from core.messages.to_conductor import (
    DecodeLoad,
    PoolReport,
    PrefillLoad,
    RegisterWorker,
    WorkerCapacity,
    WorkerReport,
    WorkerRole,
)

MAX_REMEMBERED_LIVES = 64
MAX_REMEMBERED_ENDS = 4096


@dataclass(frozen=True, slots=True)
class Assignment:
    """An attempt and what it was predicted to take.

    `prefill` is the worker that still has to compute it, `decode` the one that decodes it (both
    the same for a coupled worker); `None` when there is none or no more. `restored` attempts were
    told by their workers after a restart of the Conductor: their sizes are unknown and 0.
    All sizes are whole numbers, so that sums over them stay exact.
    """

    attempt: AttemptId
    placed_s: float
    prefill: Incarnation | None
    decode: Incarnation | None
    prefill_us: int = 0
    context_tokens: int = 0
    decode_blocks: int = 0
    restored: bool = False

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """The workers it is assigned to, each once."""
        both = dict.fromkeys((self.prefill, self.decode))
        return tuple(worker for worker in both if worker is not None)


@dataclass(slots=True)
class WorkerEntry:
    """One life of a worker. `prefilling` is in order of placement.

    `prefill_moved_s` is when its prefill queue last lost a member, `idle_since_s` the first of an
    unbroken row of reports without work.
    """

    role: WorkerRole
    ref: WorkerRef
    capacity: WorkerCapacity
    last_seen_s: float
    prefill_moved_s: float
    report: WorkerReport | None = None
    idle_since_s: float | None = None
    prefilling: dict[RequestId, None] = field(default_factory=dict)
    decoding: dict[RequestId, None] = field(default_factory=dict)
    queued_us: int = 0
    num_restored: int = 0
    promised_blocks: int = 0
    unstarted_blocks: int = 0
    context_tokens: int = 0

    @property
    def draining(self) -> bool:
        """Whether it takes no new work."""
        return self.report is not None and self.report.draining

    @property
    def prefill_load(self) -> PrefillLoad | None:
        """Its last report on prefill work."""
        return None if self.report is None else self.report.prefill

    @property
    def decode_load(self) -> DecodeLoad | None:
        """Its last report on decode work."""
        return None if self.report is None else self.report.decode

    @property
    def num_assigned(self) -> int:
        """Requests it has anything to do for."""
        return len(self.prefilling.keys() | self.decoding.keys())


@dataclass(slots=True)
class PoolEntry:
    """One life of a pool node; `snapshot_asked_s` is set while it owes a snapshot."""

    ref: PoolRef
    num_slots: int
    slot_bytes: int
    last_seen_s: float
    snapshot_asked_s: float | None
    report: PoolReport | None = None


@dataclass(slots=True)
class _Lives:
    """The lives seen under one name, the newest last."""

    seen: deque[Incarnation] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED_LIVES))
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Routes:
    """Workers that may be combined: any of `prefills` with any of `decodes`, or a coupled one."""

    prefills: tuple[WorkerEntry, ...]
    decodes: tuple[WorkerEntry, ...]
    coupled: tuple[WorkerEntry, ...]

    def usable(self, needs_decode: bool) -> bool:
        """Whether a request can run here at all."""
        return bool(self.coupled or (self.prefills and (self.decodes or not needs_decode)))


class ClusterView:
    """Workers, pool nodes and assignments."""

    def __init__(self) -> None:
        self.workers: dict[Incarnation, WorkerEntry] = {}
        self.pools: dict[Incarnation, PoolEntry] = {}
        self.assignments: dict[RequestId, Assignment] = {}
        self.gateways: set[Incarnation] = set()
        self._ended: dict[RequestId, int] = {}
        self._lives: dict[str, _Lives] = {}

    # --- lives ---

    def replaced_by(self, name: str, incarnation: Incarnation) -> Incarnation | None:
        """Return the newer life that has taken the name of this one, if there is one."""
        lives = self._lives.get(name)
        if lives is None or incarnation not in lives.seen or lives.seen[-1] == incarnation:
            return None
        return lives.seen[-1]

    def begin_life(self, name: str, incarnation: Incarnation) -> Incarnation | None:
        """Note a registration; return the older life that it replaces under this name."""
        lives = self._lives.setdefault(name, _Lives())
        older = lives.seen[-1] if lives.seen else None
        if older == incarnation:
            return None
        lives.seen.append(incarnation)
        lives.restarts += older is not None
        return older

    def restarts(self, name: str) -> int:
        """Count the earlier lives under this name."""
        lives = self._lives.get(name)
        return 0 if lives is None else lives.restarts

    # --- workers ---

    def add_worker(self, now_s: float, message: RegisterWorker) -> None:
        """Add a worker, or update one that registers again, with the attempts it works on."""
        incarnation = message.ref.incarnation
        entry = self.workers.get(incarnation)
        if entry is None:
            entry = WorkerEntry(message.role, message.ref, message.capacity, now_s, now_s)
            self.workers[incarnation] = entry
        entry.role, entry.ref, entry.capacity = message.role, message.ref, message.capacity
        entry.last_seen_s, entry.idle_since_s = now_s, None
        for attempt in message.attempts:
            self._restore(now_s, attempt, incarnation, message.role)

    def _restore(
        self, now_s: float, attempt: AttemptId, worker: Incarnation, role: WorkerRole
    ) -> None:
        known = self.assignments.get(attempt.request)
        if known is not None and known.attempt.attempt > attempt.attempt:
            return
        if self.has_ended(attempt):
            return  # the worker will notice
        if known is None or known.attempt.attempt < attempt.attempt:
            known = Assignment(attempt, now_s, None, None, restored=True)
        prefill, decode = known.prefill, known.decode
        if role is not WorkerRole.DECODE and known.restored and prefill is None:
            prefill = worker
        if role is not WorkerRole.PREFILL and decode is None:
            decode = worker
        self.assign(now_s, replace(known, prefill=prefill, decode=decode))

    def drop_worker(self, now_s: float, incarnation: Incarnation) -> None:
        """Forget a worker and its part of every assignment."""
        entry = self.workers[incarnation]
        for request in (*entry.prefilling, *entry.decoding):
            known = self.assignments.get(request)
            if known is not None:
                prefill = None if known.prefill == incarnation else known.prefill
                decode = None if known.decode == incarnation else known.decode
                self.assign(now_s, replace(known, prefill=prefill, decode=decode))
        del self.workers[incarnation]

    def record_report(self, now_s: float, incarnation: Incarnation, report: WorkerReport) -> None:
        """Note a heartbeat of a known worker."""
        entry = self.workers[incarnation]
        entry.report, entry.last_seen_s = report, now_s
        loads = [load for load in (report.prefill, report.decode) if load is not None]
        if any(load.num_waiting or load.num_running for load in loads):
            entry.idle_since_s = None
        elif entry.idle_since_s is None:
            entry.idle_since_s = now_s

    def routes(self, needs_decode: bool, excluded: Collection[Incarnation]) -> Routes | None:
        """Return the workers to choose from; `None` when no combination of them can serve.

        Draining workers never count. Excluded ones, and those whose pool node is not here, count
        in a role that has no other, if the request could not be served otherwise.
        """
        live = [w for w in self.workers.values() if not w.draining]
        good = [
            w
            for w in live
            if w.ref.incarnation not in excluded and w.ref.pool.incarnation in self.pools
        ]
        routes = _sort_by_role(good)
        if routes.usable(needs_decode):
            return routes
        rest = _sort_by_role(live)
        routes = Routes(
            routes.prefills or rest.prefills, routes.decodes or rest.decodes, rest.coupled
        )
        return routes if routes.usable(needs_decode) else None

    # --- assignments ---

    def assign(self, now_s: float, assignment: Assignment) -> None:
        """Set the assignment of its request, instead of any other; without workers it ends.

        Who keeps a part of it keeps its place in the queue.
        """
        request = assignment.attempt.request
        old = self.assignments.pop(request, None)
        if assignment.workers:
            self.assignments[request] = assignment
        self._index(assignment)
        if old is not None:
            self._unindex(now_s, old, assignment)

    def _index(self, new: Assignment) -> None:
        request = new.attempt.request
        if new.prefill is not None:
            worker = self.workers[new.prefill]
            worker.prefilling[request] = None
            _add_prefill_load(worker, new, 1)
        if new.decode is not None:
            worker = self.workers[new.decode]
            worker.decoding[request] = None
            _add_decode_load(worker, new, 1)

    def _unindex(self, now_s: float, old: Assignment, new: Assignment | None) -> None:
        request = old.attempt.request
        if old.prefill is not None:
            worker = self.workers[old.prefill]
            _add_prefill_load(worker, old, -1)
            if new is None or new.prefill != old.prefill:
                del worker.prefilling[request]
                worker.prefill_moved_s = now_s
        if old.decode is not None:
            worker = self.workers[old.decode]
            _add_decode_load(worker, old, -1)
            if new is None or new.decode != old.decode:
                del worker.decoding[request]

    def end_prefill(self, now_s: float, attempt: AttemptId) -> Assignment | None:
        """Note the end of a prefill; return the assignment as it was, if it is the current one."""
        known = self.assignments.get(attempt.request)
        if known is None or known.attempt != attempt or known.prefill is None:
            return None
        self.assign(now_s, replace(known, prefill=None))
        return known

    def end(self, now_s: float, request: RequestId) -> None:
        """Forget the assignment of a request, if there is one."""
        known = self.assignments.pop(request, None)
        if known is not None:
            self._unindex(now_s, known, None)

    def note_end(self, attempt: AttemptId) -> None:
        """Remember that a gateway ended this attempt: what says otherwise later is out of date."""
        newest = max(attempt.attempt, self._ended.pop(attempt.request, 0))
        self._ended[attempt.request] = newest
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, attempt: AttemptId) -> bool:
        """Whether its gateway said that it ended, as far as is remembered."""
        return attempt.attempt <= self._ended.get(attempt.request, 0)

    def end_gateway(self, now_s: float, gateway: Incarnation) -> None:
        """Forget the assignments of a gateway: its workers free them by themselves."""
        self.gateways.discard(gateway)
        for request in [r for r in self.assignments if r.gateway == gateway]:
            self.end(now_s, request)

    def end_stale(self, now_s: float, before_s: float) -> None:
        """Forget attempts placed before `before_s` whose end nobody will report.

        Either all their workers report idleness since then, or their gateway is not here: workers
        told of them before they noticed that it is gone.
        """
        for request, known in list(self.assignments.items()):
            idle = [self.workers[worker].idle_since_s for worker in known.workers]
            is_idle = all(s is not None and s < before_s for s in idle)
            if known.placed_s < before_s and (is_idle or request.gateway not in self.gateways):
                self.end(now_s, request)

    def queue_s(self, now_s: float, worker: WorkerEntry) -> float:
        """Sum the predicted prefill times in a worker's queue, less what its head has had."""
        head = next(iter(worker.prefilling), None)
        if head is None:
            return 0.0
        known = self.assignments[head]
        done_s = max(0.0, now_s - max(known.placed_s, worker.prefill_moved_s))
        return worker.queued_us / 1e6 - min(done_s, known.prefill_us / 1e6)

    # --- checks ---

    def validate(self) -> None:
        """Re-derive every worker's indexes from the assignments. Raises `InvariantError`."""
        for incarnation, worker in self.workers.items():
            mine = self.assignments.items()
            prefilling = {r: a for r, a in mine if a.prefill == incarnation}
            decoding = {r: a for r, a in mine if a.decode == incarnation}
            indexes = (set(worker.prefilling), set(worker.decoding))
            if indexes != (set(prefilling), set(decoding)):
                raise InvariantError(f"{worker.ref.name}: wrong index of its requests")
            parts = (*prefilling.values(), *decoding.values())
            derived = {
                "queued_us": sum(a.prefill_us for a in prefilling.values()),
                "num_restored": sum(a.restored for a in parts),
                "promised_blocks": sum(a.decode_blocks for a in decoding.values()),
                "unstarted_blocks": sum(
                    a.decode_blocks for a in decoding.values() if a.prefill is not None
                ),
                "context_tokens": sum(a.context_tokens for a in decoding.values()),
            }
            kept = {name: getattr(worker, name) for name in derived}
            if derived != kept:
                raise InvariantError(f"{worker.ref.name}: load is {kept}, should be {derived}")
        for request, known in self.assignments.items():
            if known.attempt.request != request or not known.workers:
                raise InvariantError(f"{known.attempt}: kept under {request} without a worker")
            if any(worker not in self.workers for worker in known.workers):
                raise InvariantError(f"{known.attempt}: assigned to a worker that is gone")


def _add_prefill_load(worker: WorkerEntry, assignment: Assignment, sign: int) -> None:
    worker.queued_us += sign * assignment.prefill_us
    worker.num_restored += sign * assignment.restored


def _add_decode_load(worker: WorkerEntry, assignment: Assignment, sign: int) -> None:
    worker.num_restored += sign * assignment.restored
    worker.promised_blocks += sign * assignment.decode_blocks
    worker.context_tokens += sign * assignment.context_tokens
    if assignment.prefill is not None:
        worker.unstarted_blocks += sign * assignment.decode_blocks


def _sort_by_role(workers: Iterable[WorkerEntry]) -> Routes:
    by_role: Mapping[WorkerRole, list[WorkerEntry]] = {role: [] for role in WorkerRole}
    for worker in workers:
        by_role[worker.role].append(worker)
    return Routes(
        tuple(by_role[WorkerRole.PREFILL]),
        tuple(by_role[WorkerRole.DECODE]),
        tuple(by_role[WorkerRole.COUPLED]),
    )
