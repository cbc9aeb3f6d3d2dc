"""When to try a disk again that failed. Pure: the time is an argument."""

from __future__ import annotations


class Breaker:
    """Closed: all may write. Open: nobody may. Half-open, after a pause: one may, to find out.

    The pause doubles with every failed try, from `first_pause_s` up to `last_pause_s`.
    """

    def __init__(self, first_pause_s: float = 1.0, last_pause_s: float = 60.0) -> None:
        self._first_pause_s = first_pause_s
        self._last_pause_s = last_pause_s
        self._pause_s = first_pause_s
        self._retry_at_s: float | None = None
        self._is_trying = False

    @property
    def is_closed(self) -> bool:
        """Whether all is well, as far as known."""
        return self._retry_at_s is None

    def allows(self, now_s: float) -> bool:
        """Whether work may begin now. Changes nothing: tell with `began` that it did."""
        if self._retry_at_s is None:
            return True
        return not self._is_trying and now_s >= self._retry_at_s

    def began(self) -> None:
        """Allowed work is on its way; its end is told by `succeeded` or `failed`."""
        self._is_trying = not self.is_closed

    def succeeded(self) -> None:
        """Work ended well. What began before the failure says nothing about now."""
        if self.is_closed or self._is_trying:
            self._retry_at_s = None
            self._is_trying = False
            self._pause_s = self._first_pause_s

    def failed(self, now_s: float) -> None:
        """Work failed. Failures of what began before the first one do not lengthen the pause."""
        if self._is_trying:
            self._pause_s = min(2 * self._pause_s, self._last_pause_s)
        elif not self.is_closed:
            return
        self._is_trying = False
        self._retry_at_s = now_s + self._pause_s
