"""What the launcher says about deaths and restarts, from one look at the records to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.state_dir import ProcessRecord
from core.ids import Incarnation


class Lives:
    """Which life of each process was seen last, and whether its end has been told."""

    def __init__(self, records: Mapping[str, ProcessRecord]) -> None:
        self._seen = dict(records)
        self._told: set[Incarnation] = set()

    def look(
        self, records: Mapping[str, ProcessRecord], is_alive: Callable[[ProcessRecord], bool]
    ) -> list[str]:
        """Return a line for each death and each restart since the last look, in order."""
        lines: list[str] = []
        for name, before in self._seen.items():
            now = records.get(name, before)
            is_new = now.incarnation != before.incarnation
            if before.incarnation not in self._told and (is_new or not is_alive(before)):
                self._told.add(before.incarnation)
                lines.append(f"{name} (process {before.pid}) died; Ray restarts it")
            if is_new:
                self._told.discard(before.incarnation)
                lines.append(f"{name} was restarted as process {now.pid}")
        self._seen |= records
        return lines
