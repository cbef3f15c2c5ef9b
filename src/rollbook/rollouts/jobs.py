"""Running one agent: what it is given, how its end is awaited, and the clocks that end it, which go by
what the proxy's log says of its trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from rollbook.rollouts.config import ClocksConfig
from rollbook.rollouts.launchers.agent_environment import Address
from rollbook.rollouts.launchers.launching import Exit, Leak
from rollbook.rollouts.outcome import Ended, Observed
from rollbook.rollouts.proxy import FAILURES, Proxy
from rollbook.rollouts.tasks import Task
from rollbook.store.cut import parse_cut
from rollbook.store.errors import RolloutError
from rollbook.store.events import Json, Record, TrajectoryFinished, TurnDelivered, TurnFailed, TurnRequested

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


KINDS = (TurnRequested.KIND, TurnDelivered.KIND, TurnFailed.KIND, TrajectoryFinished.KIND)
CATCH_UP_S = 60.0
"""So long is waited until the log is read up to where it was, behind a proxy that has much to do."""


@dataclass(slots=True)
class Activity:
    """What the proxy has seen of a trajectory.

    Attributes:
        last_s: when it was last heard of, of the monotonic clock.
    """

    seen: Observed = field(default_factory=Observed)
    last_s: float = field(default_factory=time.monotonic)


class Watch:
    """Follows the log; of trajectories that nobody asks about it keeps nothing."""

    def __init__(self, proxy: Proxy, run: str, cut: str) -> None:
        self._proxy, self.run, self._cut = proxy, run, cut
        self._activities: dict[str, Activity] = {}
        self._away_s: float | None = None
        """When the proxy was last away, of the monotonic clock."""
        self._there = True
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def begin(self, trajectory_id: str) -> Activity:
        """Keep what is seen of a trajectory, until `end`."""
        return self._activities.setdefault(trajectory_id, Activity())

    def end(self, trajectory_id: str) -> None:
        """Nobody asks any more."""
        self._activities.pop(trajectory_id, None)

    def seen(self, activity: Activity) -> Observed:
        """What was seen of a trajectory by now."""
        away = not self._there or (self._away_s is not None and self._away_s >= activity.last_s)
        return replace(activity.seen, away=away)

    async def catch_up(self) -> None:
        """Return once all is seen that the log has by now, or the proxy is away."""
        with contextlib.suppress(*FAILURES, RolloutError):
            async with asyncio.timeout(CATCH_UP_S):
                _, now = await self._proxy.recorded(self.run, KINDS, "head")
                head = parse_cut(now)
                while self._there and any(parse_cut(self._cut).get(k, 0) < n for k, n in head.items()):
                    await self._moved.wait()

    def _connected(self, there: bool) -> None:
        self._there, self._away_s = there, time.monotonic()
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _follow(self) -> None:
        async for events, cut in self._proxy.batches(self.run, KINDS, self._cut, self._connected):
            for event in events:
                self._take(event.record)
            self._cut = cut
            self._move()

    def _take(self, record: Record) -> None:
        activity = self._activities.get(getattr(record, "trajectory_id", ""))
        if activity is None:
            return
        activity.last_s = time.monotonic()
        match record:
            case TurnRequested():
                activity.seen = replace(activity.seen, requests=activity.seen.requests + 1)
            case TurnFailed():
                activity.seen = replace(activity.seen, failed=True)
            case TurnDelivered():
                activity.seen = replace(activity.seen, failed=False)
            case TrajectoryFinished():
                activity.seen = replace(activity.seen, finished=record.status)
