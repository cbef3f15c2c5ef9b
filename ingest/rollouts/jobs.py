"""What it is to run an agent: what is given to it, how its end is waited for, and the clocks that end it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rollbook.ingest.rollouts.config import ClocksConfig
from rollbook.ingest.rollouts.launching import Exit, Leak
from rollbook.ingest.rollouts.outcome import Ended
from rollbook.ingest.rollouts.tasks import Task
from rollbook.ingest.rollouts.told import Address
from rollbook.ingest.rollouts.watch import Activity
from rollbook.store.events import Json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """An agent to run.

    Attributes:
        folder: the launch's own.
        activity: what the proxy sees of it.
        stop: set once nobody waits for it any more.
        labels: for whoever looks at what runs.
    """

    launch_id: str
    task: Task
    group: str
    address: Address
    folder: Path
    activity: Activity
    stop: asyncio.Event
    labels: Mapping[str, str]


class Started(Protocol):
    """An agent that runs."""

    isolation: Json

    async def end(self) -> tuple[Ended, Exit | None]:
        """Wait for its end, or end it when a clock runs out; nothing of it is left then."""


class Agents(Protocol):
    """Starts agents, all alike."""

    async def start(self, job: Job) -> Started:
        """Start one.

        Raises:
            LaunchError: it cannot be started.
        """

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """Find and end what launches that are not alive left behind.

        Args:
            dead: launches of processes that are known to be gone.
        """

    async def close(self) -> None:
        """Let go of what it holds for all of them; none runs any more."""


async def until(running: Awaitable[T], job: Job, clocks: ClocksConfig) -> str | None:
    """Wait for an agent's end; the clock that ran out before it, or `cancelled`; None: it ended."""
    began, future = time.monotonic(), asyncio.ensure_future(running)
    stop = asyncio.ensure_future(job.stop.wait())
    try:
        while True:
            which, at = _next(clocks, began, job.activity)
            left = None if at is None else max(at - time.monotonic(), 0.0)
            if not job.activity.seen.requests and clocks.idle_s is not None:
                # With its first request, of which nothing is heard here, another clock begins.
                left = clocks.idle_s if left is None else min(left, clocks.idle_s)
            done, _ = await asyncio.wait({future, stop}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if future in done:
                return None
            if stop in done:
                return "cancelled"
            if (at := _next(clocks, began, job.activity)[1]) is not None and at <= time.monotonic():
                return which
    finally:
        stop.cancel()


def _next(clocks: ClocksConfig, began: float, activity: Activity) -> tuple[str, float | None]:
    """The clock that runs out first, and when."""
    ends: list[tuple[float, str]] = []
    if clocks.total_s is not None:
        ends.append((began + clocks.total_s, "total"))
    if not activity.seen.requests and clocks.start_s is not None:
        ends.append((began + clocks.start_s, "start"))
    if activity.seen.requests and clocks.idle_s is not None:
        ends.append((activity.last_s + clocks.idle_s, "idle"))
    if not ends:
        return "", None
    at, which = min(ends)
    return which, at
