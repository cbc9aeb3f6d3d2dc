"""Counts bytes and seconds of transfers between processes, for reports and `/metrics`."""

from __future__ import annotations

from core.messages.to_conductor import TransferTotals


class TransferMeter:
    """Sums since the start of this process, by the names of source and destination."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, float]] = {}

    def add(self, source: str, destination: str, num_bytes: int, seconds: float) -> None:
        """Count bytes that arrived, and the time that it took."""
        bytes_so_far, seconds_so_far = self._sums.get((source, destination), (0, 0.0))
        self._sums[source, destination] = (bytes_so_far + num_bytes, seconds_so_far + seconds)

    def totals(self) -> tuple[TransferTotals, ...]:
        """Return every sum, in order of the names."""
        return tuple(TransferTotals(*names, *sums) for names, sums in sorted(self._sums.items()))
