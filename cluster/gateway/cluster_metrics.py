"""Figures that workers, pool nodes and the Conductor told, as Prometheus families.

They come from one `ClusterState`. Counters are those of each process's life: they start at 0 again
with a restart, which Prometheus understands, because every process has labels of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from core.messages.to_conductor import (
    ClusterState,
    PoolReport,
    TransferTotals,
    WorkerRole,
    WorkerState,
)
from core.messages.to_pool import Tier

_ROLE = ("model_name", "role")
_PROCESS = ("model_name", "role", "worker")
_ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)


class ClusterCollector(Collector):
    """Renders the newest state that `state` was set to; nothing before the first."""

    def __init__(self, model_name: str) -> None:
        self.state: ClusterState | None = None
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        if self.state is not None:
            yield from self._loads(self.state.workers)
            yield from self._pools(self.state.workers)
            yield from self._transfers(self.state.workers)
            yield from self._conductor(self.state)

    def _loads(self, workers: Iterable[WorkerState]) -> Iterator[Metric]:
        """Sum over the workers of a role; a coupled worker counts in both."""
        running, waiting, used, total = (dict.fromkeys(_ROLES, 0) for _ in range(4))
        for worker in workers:
            report = worker.report
            if report is None:
                continue
            for role, load in zip(_ROLES, (report.prefill, report.decode), strict=True):
                if load is not None:
                    running[role] += load.num_running
                    waiting[role] += load.num_waiting
                    used[role] += worker.num_blocks - load.free_blocks
                    total[role] += worker.num_blocks
        usage = {role: used[role] / total[role] if total[role] else 0.0 for role in _ROLES}
        yield self._by_role("vllm:num_requests_running", "Requests in a worker's batch.", running)
        yield self._by_role("vllm:num_requests_waiting", "Requests waiting at workers.", waiting)
        text = "Used part of the paged caches, 0 to 1."
        yield self._by_role("vllm:kv_cache_usage_perc", text, usage)

    def _by_role(self, name: str, text: str, values: Mapping[WorkerRole, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_ROLE)
        for role, value in values.items():
            family.add_metric((self._model, role), value)
        return family

    def _pools(self, workers: Iterable[WorkerState]) -> Iterator[Metric]:
        size = GaugeMetricFamily(
            "halfmoon_pool_bytes", "Slots of the pool.", labels=(*_PROCESS, "tier", "state")
        )
        leases = GaugeMetricFamily("halfmoon_pool_leases", "Leases held.", labels=_PROCESS)
        counters = {
            name: CounterMetricFamily(name, text, labels=_PROCESS)
            for name, text in (
                ("halfmoon_blocks_evicted", "Blocks given up for others."),
                ("halfmoon_blocks_replicated", "Blocks fetched from another pool node."),
                ("halfmoon_blocks_corrupted", "Copies whose checksum was found wrong."),
                ("halfmoon_kv_lease_expired", "Leases and reservations that ran out."),
            )
        }
        for worker in workers:
            report, slot_bytes = worker.pool_report, worker.slot_bytes
            if report is None or slot_bytes is None:
                continue
            labels = (self._model, worker.role, worker.name)
            for state, num_slots in _slots(report):
                size.add_metric((*labels, Tier.DRAM, state), num_slots * slot_bytes)
            leases.add_metric(labels, report.num_leases)
            totals = report.totals
            for family, value in zip(
                counters.values(),
                (
                    totals.num_evicted_blocks,
                    totals.num_fetched_blocks,
                    totals.num_corrupted_blocks,
                    totals.num_expired_leases,
                ),
                strict=True,
            ):
                family.add_metric(labels, value)
        yield from (size, leases, *counters.values())

    def _transfers(self, workers: Iterable[WorkerState]) -> Iterator[Metric]:
        """Show each link once for each process that measures it."""
        labels = (*_PROCESS, "source", "destination")
        size = CounterMetricFamily("halfmoon_transfer_bytes", "Bytes moved.", labels=labels)
        took = CounterMetricFamily("halfmoon_transfer_seconds", "Seconds taken.", labels=labels)
        for worker in workers:
            for link in _links(worker):
                at = (self._model, worker.role, worker.name, link.source, link.destination)
                size.add_metric(at, link.num_bytes)
                took.add_metric(at, link.seconds)
        yield from (size, took)

    def _conductor(self, state: ClusterState) -> Iterator[Metric]:
        at = (self._model, "conductor")
        gaps = CounterMetricFamily(
            "halfmoon_directory_gaps", "Batches that the directory missed.", labels=_ROLE
        )
        gaps.add_metric(at, state.num_directory_gaps)
        indexed = GaugeMetricFamily(
            "halfmoon_indexed_blocks", "Blocks that the directory knows.", labels=_ROLE
        )
        indexed.add_metric(at, state.num_indexed_blocks)
        yield from (gaps, indexed)


def _slots(report: PoolReport) -> tuple[tuple[str, int], ...]:
    return (
        ("free", report.num_free),
        ("reserved", report.num_reserved),
        ("committed", report.num_committed),
        ("evicting", report.num_evicting),
        ("quarantined", report.num_quarantined),
    )


def _links(worker: WorkerState) -> tuple[TransferTotals, ...]:
    if worker.pool_report is not None:
        return worker.pool_report.transfers
    return () if worker.report is None else worker.report.transfers
