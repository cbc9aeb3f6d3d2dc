"""A Halfmoon server as a child process, for checks and benchmarks that start their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from cluster.state_dir import ProcessRecord, StateDir, is_alive
from cluster.status import fetch_state
from core.errors import HalfmoonError
from core.messages.to_conductor import ClusterState

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


class ServerProcess:
    """`with ServerProcess(config, work_dir) as server:` runs `halfmoon serve` until ready.

    `config` is the cluster YAML as a dictionary; host, port and state directory are filled in.
    Output goes to `server.log` in `work_dir`. On exit the server is stopped by SIGTERM, and it is
    an error (`HalfmoonError`) if any process of it is left after that.
    """

    def __init__(self, config: dict[str, Any], work_dir: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = work_dir / "server.log"
        self.ready_s = 0.0
        self._config_path = work_dir / "cluster.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        work_dir.mkdir(parents=True, exist_ok=True)
        full = {"host": "127.0.0.1", "port": self.port, "state_dir": str(work_dir / "state")}
        self.state_dir = work_dir / "state"
        self._config_path.write_text(yaml.safe_dump({**full, **config}))

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait for `/ready`. Raises `HalfmoonError` with the end of the log."""
        started_s = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster", "serve", "--config", str(self._config_path)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            while not self.is_ready():
                if self._process.poll() is not None:
                    raise HalfmoonError(f"the server ended at start:\n{self.log_tail()}")
                if time.monotonic() - started_s > READY_TIMEOUT_S:
                    raise HalfmoonError(f"not ready in {READY_TIMEOUT_S} s:\n{self.log_tail()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started_s

    def is_ready(self) -> bool:
        """Whether `/ready` answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as response:
                return int(response.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def get_json(self, path: str) -> dict[str, Any]:
        """GET a JSON document. Raises `urllib.error.URLError`."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as response:
            document: dict[str, Any] = json.loads(response.read())
            return document

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric in `/metrics`, by name and labels as they stand there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith(name))
        return {labels: float(value) for labels, _, value in samples}

    def records(self, kind: str) -> list[ProcessRecord]:
        """The processes of one kind that run now, by name."""
        records = StateDir(self.state_dir).read_processes().values()
        return [r for r in records if r.kind == kind and is_alive(r)]

    def cluster_state(self) -> ClusterState:
        """What the Conductor knows. Raises `HalfmoonError` or `TimeoutError` while it is down."""
        conductors = self.records("conductor")
        if not conductors:
            raise HalfmoonError("the Conductor is down")
        return asyncio.run(fetch_state(conductors[0], StateDir(self.state_dir).read_secret()))

    def kill(self, pid: int) -> None:
        """Kill -9 one of the server's processes."""
        os.kill(pid, signal.SIGKILL)

    def log_tail(self, num_bytes: int = 4000) -> str:
        """The end of the server's output."""
        return self.log_path.read_bytes()[-num_bytes:].decode(errors="replace")

    def _descendants(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Stop by SIGTERM. Raises `HalfmoonError` when something outlives it (after killing it)."""
        if self._process is None:
            return
        family = self._descendants()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(family, timeout=5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if alive:
            names = ", ".join(f"{p.pid}" for p in alive)
            raise HalfmoonError(f"processes outlived the server and were killed: {names}")


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
