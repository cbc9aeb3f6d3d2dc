"""Every event the Conductor handled and what it decided, one JSON line each; and the replay.

A log is a row of sections, one per life of the Conductor:

    {"schema": 1, "protocol": 1, "epoch": 7, "config": {...}}
    {"event": ["Ticked", 12.5], "actions": []}

Events and actions are written as on the wire (positional, by name), bytes as `{"b64": "..."}`.
A last line that a crash tore is no part of the log.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import msgpack

from core.config import ConductorConfig
from core.errors import ConfigError, WireError
from core.wire import PROTOCOL_VERSION, MessageSet
from scheduler.conductor import Conductor
from scheduler.events import ACTIONS, EVENTS, Action, Event

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_BUFFERED_BYTES = 1 << 20
MAX_LOG_BYTES = 1 << 30

_EVENTS = MessageSet(*EVENTS)
_ACTIONS = MessageSet(*ACTIONS)


class EventLog:
    """Appends one section to a file. A disk that fails ends the log, not the Conductor."""

    def __init__(
        self, path: Path, config: ConductorConfig, epoch: int, *, max_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._max_bytes = max_bytes
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._file: IO[bytes] | None = path.open("ab+", buffering=0)
        self._written_bytes = _cut_torn_line(self._file)
        header = {"schema": SCHEMA_VERSION, "protocol": PROTOCOL_VERSION, "epoch": epoch}
        self._append({**header, "config": asdict(config)})

    def write(self, event: Event, actions: Sequence[Action]) -> None:
        """Buffer an event and its actions; written at `flush` or when the buffer is full."""
        if self._file is not None:
            self._append(
                {
                    "event": _to_json(_EVENTS, event),
                    "actions": [_to_json(_ACTIONS, action) for action in actions],
                }
            )

    def flush(self) -> None:
        """Write what is buffered."""
        if self._file is None or not self._buffer:
            return
        raw = b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        if self._written_bytes + len(raw) > self._max_bytes:
            self._end(f"it would pass {self._max_bytes} bytes")
            return
        try:
            rest = memoryview(raw)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._written_bytes += len(raw)
        except OSError as error:
            self._end(str(error))

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, record: dict[str, object]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._buffer.append(line)
        self._buffered_bytes += len(line)
        if self._buffered_bytes >= MAX_BUFFERED_BYTES:
            self.flush()

    def _end(self, reason: str) -> None:
        log.error("the event log ends here: %s", reason)
        assert self._file is not None
        self._file.close()
        self._file = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first line whose replay decided otherwise; both as JSON."""

    line: int
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay went through; `mismatch` is `None` when every action was identical."""

    num_sections: int
    num_events: int
    mismatch: Mismatch | None


def replay_file(path: Path) -> ReplayResult:
    """Replay a log file. Raises `OSError` and what `replay` raises."""
    with path.open("rb") as file:
        return replay(file)


def replay(lines: Iterable[bytes]) -> ReplayResult:
    """Feed logged events to fresh Conductors and compare their actions with the logged ones.

    Raises `ConfigError` for a log of another schema or protocol version, or one that is damaged
    elsewhere than at its end.
    """
    conductor: Conductor | None = None
    num_sections = num_events = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            if "schema" in record:
                conductor = _begin_section(record)
                num_sections += 1
                continue
            event = _event_from_json(record["event"])
            recorded = record["actions"]
        except (ValueError, KeyError, TypeError, WireError) as error:
            raise ConfigError(f"line {number} of the event log is damaged: {error}") from error
        if conductor is None:
            raise ConfigError("an event log begins with its schema")
        replayed = [_to_json(_ACTIONS, action) for action in conductor.handle(event)]
        num_events += 1
        if replayed != recorded:
            mismatch = Mismatch(number, json.dumps(recorded), json.dumps(replayed))
            return ReplayResult(num_sections, num_events, mismatch)
    return ReplayResult(num_sections, num_events, None)


def _begin_section(header: dict[str, object]) -> Conductor:
    versions = (header["schema"], header.get("protocol"))
    if versions != (SCHEMA_VERSION, PROTOCOL_VERSION):
        raise ConfigError(
            f"the log has schema and protocol {versions}; this version reads "
            f"{(SCHEMA_VERSION, PROTOCOL_VERSION)}"
        )
    config, epoch = header["config"], header["epoch"]
    if not isinstance(config, dict) or not isinstance(epoch, int):
        raise ValueError("malformed header")
    return Conductor(ConductorConfig(**config), epoch)


def _cut_torn_line(file: IO[bytes]) -> int:
    """Cut an unfinished last line; return the size left, where the file now stands."""
    size = file.seek(0, 2)
    while size:
        start = max(0, size - MAX_BUFFERED_BYTES)
        file.seek(start)
        newline = file.read(size - start).rfind(b"\n")
        if newline >= 0:
            size = start + newline + 1
            break
        size = start
    file.truncate(size)
    file.seek(size)
    return size


def _to_json(messages: MessageSet, message: object) -> object:
    return _plain(msgpack.unpackb(messages.encode(message)))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _event_from_json(raw: object) -> Event:
    event = _EVENTS.decode(msgpack.packb(_unplain(raw)))
    assert isinstance(event, EVENTS)
    return event


def _unplain(value: object) -> object:
    if isinstance(value, dict):
        return base64.b64decode(value["b64"])
    return [_unplain(item) for item in value] if isinstance(value, list) else value
