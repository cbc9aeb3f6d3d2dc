"""`halfmoon status`: what the Conductor of a running cluster knows, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict

from rich import box
from rich.console import Console, Group
from rich.table import Table

from cluster.state_dir import ProcessRecord, StateDir, is_alive
from core.errors import ConfigError, HalfmoonError
from core.ids import Incarnation
from core.messages import to_conductor
from core.messages.to_conductor import ClusterState, GetClusterState, WorkerState
from core.net import BaseHandler, Identity, dial

_TIMEOUT_S = 5.0
_WIDE_COLUMNS = 100
"""From here on there is room for the pool node of each worker."""


def show_status(state: StateDir, console: Console, *, as_json: bool) -> int:
    """Print the status; return the exit code: 1 when anything is down. Raises `ConfigError`.

    While the Conductor is down the processes are shown as they recorded themselves.
    """
    processes = state.read_processes()
    has_launcher = state.is_locked()
    if not has_launcher and not any(map(is_alive, processes.values())):
        raise ConfigError(
            f"no cluster runs in {state.path}: start one with `halfmoon serve`, or name the state "
            "directory of a running one with --state-dir"
        )
    cluster, problem = _ask(state, processes.get("conductor"))
    problems = [] if problem is None else [problem]
    if not has_launcher:
        problems.append(
            "the launcher died: its processes are ending; `halfmoon serve` cleans up and starts "
            "again"
        )
    down = [record.name for record in processes.values() if not is_alive(record)]
    if as_json:
        document = {
            "processes": [asdict(record) for record in processes.values()],
            "down": down,
            "problems": problems,
            "cluster": None if cluster is None else asdict(cluster),
        }
        print(json.dumps(document, indent=1, default=_plain))
    else:
        url = str(state.read_run().get("url", ""))
        console.print(render_status(cluster, processes, url, console.width))
        for line in problems:
            console.print(f"[red]{line}")
    return 1 if down or problems else 0


def _ask(
    state: StateDir, conductor: ProcessRecord | None
) -> tuple[ClusterState | None, str | None]:
    """Return what the Conductor knows, or why it does not tell."""
    if conductor is None:
        return None, f"the Conductor has not started yet; see {state.logs}"
    if not is_alive(conductor):
        return None, f"the Conductor is down; Ray restarts it; see {state.logs}"
    try:
        return asyncio.run(fetch_state(conductor, state.read_secret())), None
    except ConfigError:
        raise
    except (HalfmoonError, TimeoutError) as error:
        return None, f"the Conductor does not answer ({error or 'timed out'}); see {state.logs}"


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


def render_status(
    cluster: ClusterState | None, processes: Mapping[str, ProcessRecord], url: str, width: int
) -> Group:
    """Return heading and table, to be read at 80 columns as well as on a wide screen.

    `restarts` are those of the process records of this machine; processes of other machines show
    what the Conductor saw in its own life. Without `cluster` there are no loads.
    """
    return Group(_heading(cluster, url), _table(cluster, processes, width))


def _heading(cluster: ClusterState | None, url: str) -> str:
    if cluster is None:
        return f"[bold]{url}[/]"
    return (
        f"[bold]{url}[/]  policy {cluster.policy}, epoch {cluster.epoch}\n"
        f"{cluster.num_placed} placed, {cluster.num_rejected} rejected, "
        f"{cluster.num_indexed_blocks} indexed blocks, "
        f"{cluster.num_directory_gaps} directory gaps"
    )


def _table(
    cluster: ClusterState | None, processes: Mapping[str, ProcessRecord], width: int
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    is_wide = width >= _WIDE_COLUMNS
    for heading in ("process", "pid", "state", "restarts", "load", "free blocks"):
        is_number = heading in ("pid", "restarts", "free blocks")
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=heading != "load"
        )
    if is_wide:
        table.add_column("pool", no_wrap=True)
    known = {} if cluster is None else {worker.name: worker for worker in cluster.workers}
    for name in sorted({*processes, *known}):
        record, worker = processes.get(name), known.get(name)
        cells = (
            name,
            "" if record is None else str(record.pid),
            _state(record),
            _restarts(record, worker),
            "" if worker is None else _load(worker),
            "" if worker is None else _free(worker),
        )
        table.add_row(*cells, *(["" if worker is None else worker.pool] if is_wide else []))
    return table


def _state(record: ProcessRecord | None) -> str:
    if record is None:
        return "elsewhere"
    return f"[green]up[/] {_age(record)}" if is_alive(record) else "[red]down"


def _restarts(record: ProcessRecord | None, worker: WorkerState | None) -> str:
    restarts = 0
    if record is not None:
        restarts = record.restarts
    elif worker is not None:
        restarts = worker.restarts
    return f"[yellow]{restarts}" if restarts else "0"


def _load(worker: WorkerState) -> str:
    parts = [f"{worker.num_assigned} assigned"] if worker.num_assigned else []
    report = worker.report
    if report is not None and report.draining:
        parts.append("draining")
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
    if pool is not None:
        return f"{pool.num_free}/{worker.num_blocks}"
    loads = () if report is None else (report.prefill, report.decode)
    free = next((load.free_blocks for load in loads if load is not None), None)
    return "" if free is None else f"{free}/{worker.num_blocks}"


def _age(record: ProcessRecord) -> str:
    # The only wall clock here: the kernel gives a process's start by it.
    seconds = int(time.clock_gettime(time.CLOCK_REALTIME) - record.created_s)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
