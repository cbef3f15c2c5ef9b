"""An event loop whose clock stands still while anything runs, and jumps to the next timer then."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Where it would wait for a timer, the clock jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left that could go on")
        self.now += 0.0 if ready else max(timeout or 0.0, 0.0)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is what its selector says; nothing in it may wait for other threads."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run it: hours of waiting take no time, and a busy machine changes nothing in the order of timers."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(scenario)
