"""An asyncio loop whose clock jumps to the next timer: hours of waiting take no time, and the order
of everything follows from the program and the seed.

Work given to executors runs inside the loop, after a seeded virtual delay, so no thread is left
whose timing the seed does not decide.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any


class DeadlockError(AssertionError):
    """Nothing is scheduled any more and the main task still waits."""


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks: tells the loop to move its clock by what it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError("everybody waits and no timer is set")
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Run with `run_virtual`. `chance` decides how long executor work takes."""

    def __init__(self, seed: int, executor_delay_s: tuple[float, float] = (0.0, 0.02)) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._chance = random.Random(seed)
        self._executor_delay_s = executor_delay_s
        self.slow_callback_duration = 1e9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run `func` in the loop itself, some virtual time from now."""
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._chance.uniform(*self._executor_delay_s), run)
        return future


def run_virtual(main: Callable[[], Any], *, seed: int, limit_s: float = 600.0) -> Any:
    """Run `main()` to its end on a virtual loop. Raises `TimeoutError` past `limit_s` virtual s."""
    loop = VirtualLoop(seed)
    asyncio.set_event_loop(loop)
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        result = loop.run_until_complete(asyncio.wait_for(main(), limit_s))
        loop.run_until_complete(asyncio.sleep(1.0))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left behind: {left}"
        assert not errors, f"unhandled in the loop: {errors}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()
