"""The answer to `halfmoon status`."""

from __future__ import annotations

from core.messages.to_conductor import ClusterState, WorkerState
from scheduler.cluster_view import ClusterView


def describe_cluster(
    view: ClusterView,
    now_s: float,
    *,
    epoch: int,
    policy: str,
    num_indexed_blocks: int,
    num_placed: int,
    num_rejected: int,
    num_directory_gaps: int,
) -> ClusterState:
    """Describe workers, then pool nodes (role `pool`). `last_seen_s` is an age, not a moment."""
    workers = [
        WorkerState(
            role=worker.role,
            name=worker.ref.name,
            incarnation=incarnation,
            address=worker.ref.address,
            pool=worker.ref.pool.name,
            restarts=view.restarts(worker.ref.name),
            num_assigned=worker.num_assigned,
            num_blocks=worker.capacity.num_blocks,
            slot_bytes=None,
            report=worker.report,
            pool_report=None,
            last_seen_s=now_s - worker.last_seen_s,
        )
        for incarnation, worker in view.workers.items()
    ]
    pools = [
        WorkerState(
            role="pool",
            name=pool.ref.name,
            incarnation=incarnation,
            address=pool.ref.address,
            pool=pool.ref.name,
            restarts=view.restarts(pool.ref.name),
            num_assigned=0,
            num_blocks=pool.num_slots,
            slot_bytes=pool.slot_bytes,
            report=None,
            pool_report=pool.report,
            last_seen_s=now_s - pool.last_seen_s,
        )
        for incarnation, pool in view.pools.items()
    ]
    return ClusterState(
        epoch=epoch,
        policy=policy,
        workers=(*workers, *pools),
        num_indexed_blocks=num_indexed_blocks,
        num_placed=num_placed,
        num_rejected=num_rejected,
        num_directory_gaps=num_directory_gaps,
    )
