"""How long the parts of a step take."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class Clock:
    """Seconds by part. Each moment is counted once: a part that begins within another interrupts it.

    Args:
        rest: the part that moments in no other belong to.
    """

    def __init__(self, rest: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = [rest]
        self._since = time.perf_counter()

    def begin(self, part: str) -> None:
        """A part begins."""
        self._count()
        self._running.append(part)

    def end(self) -> None:
        """The part that began last ends."""
        self._count()
        self._running.pop()

    def now(self) -> dict[str, float]:
        """The seconds of each part until now."""
        self._count()
        return dict(self.seconds)

    def _count(self) -> None:
        if torch.cuda.is_initialized():  # what was asked of a GPU belongs to the part that asked
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def clock(rest: str) -> Iterator[Clock]:
    """Within, parts that are `timed` are counted, and all else as `rest`."""
    made = Clock(rest)
    token = _CLOCK.set(made)
    try:
        yield made
    finally:
        made.end()
        _CLOCK.reset(token)


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Within, time counts as this part, where somebody counts."""
    counting = _CLOCK.get()
    if counting is None:
        yield
        return
    counting.begin(part)
    try:
        yield
    finally:
        counting.end()
