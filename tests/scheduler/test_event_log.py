"""The event log: replays to identical actions, survives a torn end, is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from core.errors import ConfigError
from core.ids import Incarnation
from scheduler import event_log
from scheduler.event_log import EventLog, replay, replay_file
from scheduler.events import PeerLost, Ticked
from tests.scheduler.cases import Cluster
from tests.scheduler.story import Story


class LoggedCluster(Cluster):
    def __init__(self, path: Path, epoch: int = 1, **config) -> None:
        super().__init__(epoch, **config)
        self.log = EventLog(path, self.conductor.config, epoch)

    def handle(self, event):
        actions = super().handle(event)
        self.log.write(event, actions)
        return actions


def record(path: Path, *, epoch: int = 1, steps: int = 400, **config) -> int:
    cluster = LoggedCluster(path, epoch, **config)
    Story(Random(epoch), cluster).run(steps)
    cluster.log.close()
    return len(cluster.events)


@pytest.mark.parametrize("policy", ["kvcache-centric", "random"])
def test_a_recorded_run_replays_to_identical_actions(tmp_path, policy):
    """Two terms in one file, each replayed by a Conductor of its own."""
    path = tmp_path / "events.jsonl"
    num_events = record(path, policy=policy) + record(path, epoch=2, policy=policy, seed=3)
    result = replay_file(path)
    assert result.mismatch is None
    assert (result.num_sections, result.num_events) == (2, num_events)


def test_a_changed_action_is_found(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path)
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'"Place"' in line)
    changed = json.loads(lines[number])
    changed["actions"][0][2][0] += 1  # the epoch of the placement
    lines[number] = json.dumps(changed).encode() + b"\n"
    result = replay(lines)
    assert result.mismatch is not None
    assert result.mismatch.line == number + 1
    assert result.mismatch.recorded != result.mismatch.replayed


def test_a_torn_last_line_is_no_part_of_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    num_events = record(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert replay_file(path).num_events == num_events - 1
    more = record(path, epoch=2)
    result = replay_file(path)
    assert (result.num_sections, result.num_events) == (2, num_events - 1 + more)
    assert result.mismatch is None


def test_a_file_that_is_all_torn_line_starts_afresh(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MAX_BUFFERED_BYTES", 16)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 100)
    num_events = record(path, steps=5)
    assert replay_file(path).num_events == num_events


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([b'{"schema":99,"protocol":4,"epoch":1,"config":{}}\n'], "schema and protocol"),
        ([b'{"event":["Ticked",1.0],"actions":[]}\n'], "begins with its schema"),
        ([b"{]\n"], "line 1"),
        ([b'{"schema":1,"protocol":4,"epoch":1,"config":{"x":1}}\n'], "line 1"),
        ([b'{"schema":1,"protocol":4}\n'], "line 1"),
        ([b'{"schema":1,"protocol":4,"epoch":1,"config":{}}\n', b'{"event":1}\n'], "line 2"),
        (
            [
                b'{"schema":1,"protocol":4,"epoch":1,"config":{}}\n',
                b'{"event":["Ticked","x"],"actions":[]}\n',
            ],
            "line 2",
        ),
    ],
)
def test_another_schema_or_a_damaged_line_is_refused(lines, reason):
    with pytest.raises(ConfigError, match=reason):
        replay(lines)


def test_the_log_is_bounded_and_its_end_stops_nothing(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    cluster = Cluster()
    log = EventLog(path, cluster.conductor.config, 1, max_bytes=2000)
    for second in range(100):
        event = Ticked(float(second))
        log.write(event, cluster.handle(event))
        log.flush()
    log.write(PeerLost(1.0, Incarnation("x")), [])
    log.close()
    assert path.stat().st_size <= 2000
    assert "the event log ends here" in caplog.text
    result = replay_file(path)
    assert 10 < result.num_events < 100
    assert result.mismatch is None


def test_a_failing_disk_ends_the_log_only(tmp_path, caplog):
    class FullDisk:
        def write(self, raw):
            raise OSError("No space left on device")

        def close(self):
            pass

    log = EventLog(tmp_path / "events.jsonl", Cluster().conductor.config, 1)
    assert log._file is not None
    log._file.close()
    log._file = FullDisk()  # type: ignore[assignment]
    log.flush()
    log.write(Ticked(1.0), [])
    log.close()
    assert "No space left" in caplog.text
