"""The state directory of a cluster: its secret, its lock, its logs, and what runs under it.

    secret              32 random bytes in hex, 0600: whoever has it is a member
    lock                held by the living launcher
    run.json            what the launcher started: its run directory and every process
    conductor.epoch     the Conductor's term, raised at each of its starts
    processes/NAME.json one for each living process, written by itself
    logs/NAME.log       what each process has to say

The run directory holds sockets and Ray's session. It lies in the temporary directory, because
paths of Unix sockets have to be short.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from core.errors import ConfigError
from core.ids import Address, Incarnation

_SECRET_BYTES = 32
_RUN_DIR_PREFIX = "halfmoon-"
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One life of one process. `created_s` tells it from a later process with the same pid.

    `restarts` counts the earlier lives that worked under this name in the same run.
    """

    name: str
    kind: str
    incarnation: Incarnation
    pid: int
    created_s: float
    address: Address
    restarts: int = 0


def default_state_dir() -> Path:
    """Return the state directory of the user's default cluster."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "halfmoon" / "default"


class StateDir:
    """Files below `path`; see the module's docstring."""

    def __init__(self, path: Path | str | None) -> None:
        try:
            self.path = default_state_dir() if path is None else Path(path).expanduser().absolute()
        except RuntimeError as error:  # ~nobody
            raise ConfigError(f"`state_dir` {str(path)!r}: {error}; use --state-dir") from error
        self.logs = self.path / "logs"
        self.epoch_file = self.path / "conductor.epoch"
        self.event_log = self.path / "events.log"
        self._secret = self.path / "secret"
        self._lock = self.path / "lock"
        self._run = self.path / "run.json"
        self._processes = self.path / "processes"

    def prepare(self) -> None:
        """Create the directory, the user's own, if need be. Raises `ConfigError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.logs, self._processes):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the state directory {self.path}: {error.strerror}; choose another "
                "with `state_dir` (--state-dir)"
            ) from error
        if self.path.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.path} belongs to another user; choose your own --state-dir")
        self.path.chmod(0o700)

    def lock(self) -> int:
        """Take the lock for this process's life. Raises `ConfigError` when a cluster runs here."""
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write in the state directory {self.path}: {error.strerror}; choose "
                "another with `state_dir` (--state-dir)"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            run = self.read_run()
            raise ConfigError(
                f"a cluster already runs in {self.path} (process {run.get('pid', 'unknown')}): "
                "stop it, or choose another --state-dir"
            ) from None
        return fd

    def is_locked(self) -> bool:
        """Whether a living launcher holds this directory. Raises `ConfigError`."""
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ConfigError(f"cannot read {self._lock}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    # --- secret ---

    def ensure_secret(self) -> None:
        """Make the cluster secret if there is none yet."""
        with contextlib.suppress(FileExistsError):
            fd = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(_SECRET_BYTES) + "\n")

    def read_secret(self) -> bytes:
        """Return the cluster secret. Raises `ConfigError` when it is missing or not private."""
        try:
            mode = self._secret.stat().st_mode
            text = self._secret.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"cannot read the cluster secret {self._secret}: {error.strerror}; on a further "
                "machine copy it there from the first one"
            ) from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"others can read {self._secret}: run chmod 600 {self._secret}")
        if len(text) < 2 * _SECRET_BYTES:
            raise ConfigError(f"{self._secret} is too short: remove it, and a new one is made")
        return text.encode()

    # --- what runs ---

    def make_run_dir(self) -> Path:
        """Make the private directory of this run."""
        return Path(tempfile.mkdtemp(prefix=_RUN_DIR_PREFIX))

    def write_run(self, run_dir: Path, processes: Iterable[psutil.Process], url: str) -> None:
        """Record this launcher and its descendants, so that the next start can clean up."""
        own = psutil.Process()
        record = {
            "pid": own.pid,
            "created_s": own.create_time(),
            "run_dir": str(run_dir),
            "url": url,
            "processes": [[p.pid, p.create_time()] for p in processes],
        }
        _write_json(self._run, record)

    def read_run(self) -> dict[str, Any]:
        """Return what `write_run` recorded; empty when nothing runs or ran."""
        return _read_json(self._run)

    def clear_run(self) -> None:
        """Forget the run: everything of it is gone."""
        self._run.unlink(missing_ok=True)
        for path in self._processes.glob("*.json"):
            path.unlink(missing_ok=True)

    def write_process(self, record: ProcessRecord) -> ProcessRecord:
        """Record a living process under its name; return it with the restarts counted."""
        self._processes.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._processes / f"{record.name}.json"
        before = _read_json(path)
        if before:
            is_new = before["incarnation"] != record.incarnation
            record = replace(record, restarts=before["restarts"] + is_new)
        _write_json(path, asdict(record))
        return record

    def read_processes(self) -> dict[str, ProcessRecord]:
        """Return the latest life of each process, by name; it may have ended since."""
        found = {}
        for path in sorted(self._processes.glob("*.json")):
            values = _read_json(path)
            if values:
                address = Address(**values.pop("address"))
                found[path.stem] = ProcessRecord(**values, address=address)
        return found

    def reap(self) -> list[int]:
        """End what a killed launcher left: processes, run directory, records; return the pids.

        Call it with the lock held. A process counts as left over only when pid and start time
        both agree with the record.
        """
        run = self.read_run()
        known = [(int(pid), float(created_s)) for pid, created_s in run.get("processes", [])]
        known += [(r.pid, r.created_s) for r in self.read_processes().values()]
        left = [p for pid, created_s in known if (p := _same_process(pid, created_s)) is not None]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_STOP_TIMEOUT_S)
        if run:
            remove_run_dir(Path(run["run_dir"]))
        self.clear_run()
        return sorted({p.pid for p in left})


def remove_run_dir(run_dir: Path) -> None:
    """Remove a run directory; anything that does not look like one is left alone."""
    if run_dir.name.startswith(_RUN_DIR_PREFIX) and not run_dir.is_symlink() and run_dir.is_dir():
        shutil.rmtree(run_dir, ignore_errors=True)


def is_alive(record: ProcessRecord) -> bool:
    """Whether that very process still runs."""
    return _same_process(record.pid, record.created_s) is not None


def _same_process(pid: int, created_s: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return process if not gone and abs(process.create_time() - created_s) < 0.02 else None
    except psutil.NoSuchProcess:
        return None


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(values))
    draft.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: remove it") from error
    return values if isinstance(values, dict) else {}
