"""The state directory: one cluster at a time, a private secret, and cleaning up after kills."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.state_dir import ProcessRecord, StateDir, is_alive
from core.errors import ConfigError
from core.ids import Address, Incarnation

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.prepare()
    return state


@pytest.fixture
def sleeper():
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def record(name: str, pid: int, created_s: float) -> ProcessRecord:
    return ProcessRecord(name, "decode", Incarnation("ab"), pid, created_s, Address("h", 1))


def test_the_secret_is_private_and_stays(state):
    state.ensure_secret()
    secret = state.read_secret()
    state.ensure_secret()
    assert state.read_secret() == secret
    assert len(secret) == 64
    assert (state.path / "secret").stat().st_mode & 0o777 == 0o600
    assert state.path.stat().st_mode & 0o777 == 0o700


def test_a_secret_that_others_can_read_is_refused(state):
    state.ensure_secret()
    (state.path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        state.read_secret()


def test_a_missing_secret_is_explained(state):
    with pytest.raises(ConfigError, match="copy it"):
        state.read_secret()


def test_one_cluster_at_a_time(state):
    assert not state.is_locked()
    fd = state.lock()
    assert state.is_locked()
    with pytest.raises(ConfigError, match="already runs"):
        state.lock()
    os.close(fd)
    assert not state.is_locked()


def test_records_survive_a_round_trip(state):
    one = record("decode-0", os.getpid(), psutil.Process().create_time())
    state.write_process(one)
    assert state.read_processes() == {"decode-0": one}
    assert is_alive(one)
    assert not is_alive(record("decode-0", os.getpid(), one.created_s - 100))


def test_restarts_are_counted_within_a_run(state):
    lives = [replace(record("gateway", 1, 1.0), incarnation=Incarnation(i)) for i in "aabbc"]
    assert [state.write_process(life).restarts for life in lives] == [0, 0, 1, 1, 2]
    assert state.read_processes()["gateway"] == replace(lives[-1], restarts=2)
    state.clear_run()
    assert state.write_process(lives[0]).restarts == 0


def test_reaping_ends_what_was_left_and_nothing_else(state, sleeper):
    process = psutil.Process(sleeper.pid)
    run_dir = state.make_run_dir()
    (run_dir / "sockets").mkdir()
    # The same pid with another start time is somebody else's process.
    state.write_process(record("decode-0", os.getpid(), 1.0))
    state.write_run(run_dir, [process], "http://h")
    assert state.reap() == [sleeper.pid]
    assert not process.is_running()
    assert not run_dir.exists()
    assert state.read_processes() == {}
    assert state.read_run() == {}


def test_only_a_run_directory_is_removed(state, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    state.write_run(precious, [], "http://h")
    assert state.reap() == []
    assert precious.is_dir()


def test_a_damaged_record_is_named(state):
    (state.path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        state.read_run()
