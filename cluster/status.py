"""`halfmoon status`: what the Conductor of a running cluster knows, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from cluster.state_dir import ProcessRecord, StateDir, is_alive
from core.errors import ConfigError, HalfmoonError
from core.ids import Incarnation
from core.messages import to_conductor
from core.messages.to_conductor import ClusterState, GetClusterState, WorkerState
from core.net import BaseHandler, Identity, dial

_TIMEOUT_S = 5.0


def show_status(state: StateDir, console: Console, *, as_json: bool) -> int:
    """Print the status; return the exit code: 1 when a process is down. Raises `ConfigError`."""
    if not state.is_locked():
        raise ConfigError(f"no cluster runs in {state.path}: start one with `halfmoon serve`")
    processes = state.read_processes()
    conductor = processes.get("conductor")
    if conductor is None or not is_alive(conductor):
        raise HalfmoonError(f"the Conductor is down; Ray restarts it; see {state.logs}")
    cluster = asyncio.run(fetch_state(conductor, state.read_secret()))
    down = [record.name for record in processes.values() if not is_alive(record)]
    if as_json:
        document = {"processes": [asdict(r) for r in processes.values()], "down": down}
        print(json.dumps(document | {"cluster": asdict(cluster)}, indent=1, default=_plain))
    else:
        url = str(state.read_run().get("url", ""))
        console.print(_heading(cluster, url))
        console.print(_table(cluster, processes))
    return 1 if down else 0


async def fetch_state(conductor: ProcessRecord, secret: bytes) -> ClusterState:
    """Ask the Conductor. Raises `HalfmoonError` or `TimeoutError`."""
    incarnation = Incarnation(secrets.token_hex(8))
    conn = await dial(
        conductor.address,
        BaseHandler(),
        identity=Identity("cli", f"cli-{os.getpid()}", incarnation),
        secret=secret,
        sends=to_conductor.MESSAGES,
        receives=to_conductor.REPLIES,
        timeout_s=_TIMEOUT_S,
    )
    try:
        reply, _ = await conn.request(GetClusterState(), timeout_s=_TIMEOUT_S)
    finally:
        conn.close()
        await conn.wait_closed()
    if not isinstance(reply, ClusterState):
        raise HalfmoonError(f"the Conductor answered with {type(reply).__name__}")
    return reply


def _heading(cluster: ClusterState, url: str) -> str:
    return (
        f"[bold]{url}[/]  policy {cluster.policy}, term {cluster.epoch}, "
        f"{cluster.num_placed} placed, {cluster.num_rejected} rejected, "
        f"{cluster.num_indexed_blocks} blocks indexed, "
        f"{cluster.num_directory_gaps} directory gaps"
    )


def _table(cluster: ClusterState, processes: dict[str, ProcessRecord]) -> Table:
    table = Table()
    for heading in ("process", "pid", "state", "restarts", "pool", "load", "free blocks"):
        table.add_column(heading, justify="right" if heading in ("pid", "restarts") else "left")
    known = {worker.name: worker for worker in cluster.workers}
    for name in sorted({*processes, *known}):
        record, worker = processes.get(name), known.get(name)
        alive = record is not None and is_alive(record)
        state = "[green]up" if alive else "[red]down"
        table.add_row(
            name,
            str(record.pid) if record is not None else "",
            state + (f" {_age(record)}" if alive and record is not None else ""),
            "" if worker is None else str(worker.restarts),
            "" if worker is None else worker.pool,
            "" if worker is None else _load(worker),
            "" if worker is None else _free(worker),
        )
    return table


def _load(worker: WorkerState) -> str:
    parts = [f"{worker.num_assigned} assigned"] if worker.num_assigned else []
    report = worker.report
    if report is not None and report.prefill is not None:
        prefill = report.prefill
        parts.append(
            f"{prefill.num_running} running, {prefill.num_waiting} waiting, "
            f"{prefill.queued_tokens} tokens queued"
        )
    if report is not None and report.decode is not None:
        decode = report.decode
        step = f", {decode.step_s * 1e3:.1f} ms a step" if decode.step_s else ""
        parts.append(f"{decode.num_running} running, {decode.num_waiting} waiting{step}")
    if worker.pool_report is not None:
        pool = worker.pool_report
        parts.append(
            f"{pool.num_committed} committed, {pool.num_reserved} reserved, "
            f"{pool.num_quarantined} in quarantine, {pool.num_leases} leases"
        )
    return "; ".join(parts)


def _free(worker: WorkerState) -> str:
    report, pool = worker.report, worker.pool_report
    counts = [pool.num_free] if pool is not None else []
    if report is not None:
        counts += [load.free_blocks for load in (report.prefill, report.decode) if load is not None]
    return " / ".join(str(count) for count in counts)


def _age(record: ProcessRecord) -> str:
    # The only wall clock here: the kernel gives a process's start by it.
    seconds = int(time.clock_gettime(time.CLOCK_REALTIME) - record.created_s)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
