"""Times the parts of a step, and reports the time and memory that steps take as metrics of a
training."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar

from rollbook.store.events import Json


class Clock:
    """Seconds by part. Each moment is counted once: a part that begins within another interrupts
    it.

    Args:
        rest: the part to which moments outside of all others belong.
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
        import torch

        if torch.cuda.is_initialized():  # what was asked of a GPU belongs to the part that asked
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def clock(rest: str) -> Iterator[Clock]:
    """A context in which parts that are `timed` are counted, and all other time as `rest`."""
    timer = Clock(rest)
    token = _CLOCK.set(timer)
    try:
        yield timer
    finally:
        timer.end()
        _CLOCK.reset(token)


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """A context whose time counts as this part, where a `clock` is running."""
    counting = _CLOCK.get()
    if counting is None:
        yield
        return
    counting.begin(part)
    try:
        yield
    finally:
        counting.end()


class Spent:
    """Counts the time between steps: checkpoints and syncs, and the wait for a batch."""

    def __init__(self) -> None:
        self._free = time.perf_counter()
        """When the trainer was done with the last batch."""
        self._waited = self._scored = self._published = 0.0
        """Seconds that no step has said yet."""

    def batch_came(self) -> None:
        """The trainer has a batch in hand."""
        self._waited = time.perf_counter() - self._free - self._scored

    def scored(self, begun: float) -> None:
        """A part of the batch to come was scored, which began at this time of the clock."""
        self._scored += time.perf_counter() - begun

    def published(self, begun: float) -> None:
        """The last version's checkpoint and sync are done, which began at this time of the clock."""
        self._free = time.perf_counter()
        self._published = self._free - begun

    def metrics(self, counted: Clock) -> Json:
        """Seconds by part, and memory, of a step and of the time before it."""
        parts = {"publish": self._published, "wait": self._waited, "scoring": 0.0} | counted.now()
        parts["scoring"] += self._scored
        self._published = self._waited = self._scored = 0.0
        return {f"{part}_s": seconds for part, seconds in parts.items()} | {"memory_gib": _peak_gib()}


def is_spent(metric: str) -> bool:
    """Whether a metric is of time or memory, which no replay computes again."""
    return metric.endswith(("_s", "_gib"))


def _peak_gib() -> float:
    """The peak memory so far of the GPU, where there is one, or of this process."""
    import torch

    if torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
