"""`halfmoon status`: what it tells, on a narrow terminal and on a wide one."""

import io
import json
import os
from dataclasses import replace
from typing import Any

import psutil
import pytest
from rich.console import Console

from cluster import status
from cluster.state_dir import ProcessRecord, StateDir
from core.ids import Address, Incarnation
from core.messages.to_conductor import (
    ClusterState,
    DecodeLoad,
    PoolReport,
    PrefillLoad,
    WorkerReport,
    WorkerState,
)

HERE = Address("127.0.0.1", 4000)
URL = "http://127.0.0.1:8000"
BUSY = WorkerReport(PrefillLoad(12, 4, 123_456, 512), DecodeLoad(3, 16, 9000, 512, 0.0123), False)


def row(name: str, role: str, **fields: Any) -> WorkerState:
    values: dict[str, Any] = {
        "role": role, "name": name, "incarnation": Incarnation(name), "address": HERE,
        "pool": "pool-0", "restarts": 0, "num_assigned": 0, "num_blocks": 4096, "slot_bytes": None,
        "report": None, "pool_report": None, "last_seen_s": 0.0,
    }  # fmt: skip
    return WorkerState(**(values | fields))


WORKERS = (
    row("prefill-0", "prefill", num_assigned=16, report=replace(BUSY, decode=None)),
    row("decode-10", "decode", restarts=1, report=replace(BUSY, prefill=None)),
    row("both-0", "coupled", num_assigned=16, report=BUSY),
    row("far-0", "decode", restarts=5),
    row("pool-0", "pool", slot_bytes=1 << 20, pool_report=PoolReport(1024, 30, 3000, 42, 99, ())),
)
CLUSTER = ClusterState(7, "kvcache-centric", WORKERS, 123_456, 9876, 54, 3)


def life(name: str, *, restarts: int = 0, created_s: float | None = None) -> ProcessRecord:
    if created_s is None:
        created_s = psutil.Process().create_time()
    kind, lives = name.split("-")[0], Incarnation(name)
    return ProcessRecord(name, kind, lives, os.getpid(), created_s, HERE, restarts)


LIVES = [
    life("conductor", restarts=2), life("gateway", restarts=3), life("pool-0", restarts=4),
    life("prefill-0"), life("decode-10", restarts=1), life("both-0", created_s=1.0),
]  # fmt: skip
PROCESSES = {record.name: record for record in LIVES}


def rendered(width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(status.render_status(CLUSTER, PROCESSES, URL, console.width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_every_figure_is_there_whole(width):
    lines = rendered(width)
    assert max(map(len, lines)) <= width
    assert lines[0].split() == [URL, "policy", "kvcache-centric,", "epoch", "7"]
    assert lines[1] == "9876 placed, 54 rejected, 123456 indexed blocks, 3 directory gaps"
    text = "\n".join(lines)
    assert "…" not in text
    words = set(text.replace(";", " ").replace(",", " ").split())
    figures = "16 12 4 123456 512/4096 12.3 1024/4096 3000 30 42 99 assigned waiting quarantine"
    assert set(figures.split()) <= words
    assert str(os.getpid()) in words


@pytest.mark.parametrize("width", [80, 120])
def test_each_process_has_one_row_that_begins_with_its_name(width):
    found = {}
    for line in rendered(width):
        first, *rest = line.split() or [""]
        if first in {*PROCESSES, "far-0"}:
            assert first not in found
            found[first] = rest
    assert set(found) == {*PROCESSES, "far-0"}
    own = str(os.getpid())
    restarts = {name: cells[4] for name, cells in found.items() if cells[:2] == [own, "up"]}
    assert restarts == {
        "conductor": "2", "gateway": "3", "pool-0": "4", "prefill-0": "0", "decode-10": "1",
    }  # fmt: skip
    assert found["both-0"][:3] == [own, "down", "0"]
    assert found["far-0"][:2] == ["elsewhere", "5"]


def test_a_wide_table_names_the_pool_node_of_each_worker():
    assert any(line.startswith(" decode-10") and "pool-0" in line for line in rendered(120))
    assert not any(line.startswith(" decode-10") and "pool-0" in line for line in rendered(80))


def test_json_has_all_of_it(tmp_path, monkeypatch, capsys):
    state = StateDir(tmp_path)
    state.prepare()
    state.ensure_secret()
    lock = state.lock()
    for name, restarts in (("conductor", 0), ("gateway", 1)):
        for number in range(restarts + 1):
            state.write_process(replace(life(name), incarnation=Incarnation(f"{name}-{number}")))
    state.write_process(life("decode-10", created_s=1.0))

    async def fetched(*_: object) -> ClusterState:
        return CLUSTER

    monkeypatch.setattr(status, "fetch_state", fetched)
    assert status.show_status(state, Console(), as_json=True) == 1
    os.close(lock)
    told = json.loads(capsys.readouterr().out)
    assert told["down"] == ["decode-10"]
    assert {p["name"]: p["restarts"] for p in told["processes"]} == {
        "conductor": 0, "gateway": 1, "decode-10": 0,
    }  # fmt: skip
    heading = {key: value for key, value in told["cluster"].items() if key != "workers"}
    assert heading == {
        "epoch": 7, "policy": "kvcache-centric", "num_indexed_blocks": 123_456,
        "num_placed": 9876, "num_rejected": 54, "num_directory_gaps": 3,
    }  # fmt: skip
    assert [worker["name"] for worker in told["cluster"]["workers"]] == [w.name for w in WORKERS]
    assert told["cluster"]["workers"][-1]["pool_report"]["num_committed"] == 3000


@pytest.mark.parametrize(
    ("conductor", "problem"),
    [
        (None, "the Conductor has not started yet"),
        (life("conductor", created_s=1.0), "the Conductor is down"),
        (life("conductor", restarts=2), "the Conductor does not answer"),
    ],
)
def test_processes_are_shown_while_the_conductor_is_silent(
    tmp_path, monkeypatch, capsys, conductor, problem
):
    state = StateDir(tmp_path)
    state.prepare()
    state.ensure_secret()
    lock = state.lock()
    for record in (life("gateway", restarts=3), *([] if conductor is None else [conductor])):
        state.write_process(record)

    async def unanswered(*_: object) -> ClusterState:
        raise TimeoutError

    monkeypatch.setattr(status, "fetch_state", unanswered)
    assert status.show_status(state, Console(width=200), as_json=False) == 1
    shown = capsys.readouterr().out
    assert problem in shown
    assert any(line.split()[:3] == ["gateway", str(os.getpid()), "up"] for line in
               shown.splitlines())  # fmt: skip
    assert status.show_status(state, Console(), as_json=True) == 1
    os.close(lock)
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] is None
    assert problem in told["problems"][0]
    assert {p["name"] for p in told["processes"]} >= {"gateway"}


def test_what_a_killed_launcher_left_is_shown(tmp_path, monkeypatch, capsys):
    state = StateDir(tmp_path)
    state.prepare()
    state.ensure_secret()
    state.write_process(life("conductor"))

    async def fetched(*_: object) -> ClusterState:
        return CLUSTER

    monkeypatch.setattr(status, "fetch_state", fetched)
    assert status.show_status(state, Console(width=200), as_json=False) == 1
    shown = capsys.readouterr().out
    assert "the launcher died" in shown
    assert "halfmoon serve" in shown
