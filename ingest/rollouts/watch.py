"""What the proxy sees of trajectories while their agents run, from its log: the clocks go by it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from rollbook.ingest.rollouts.http import FAILURES
from rollbook.ingest.rollouts.outcome import Seen
from rollbook.ingest.rollouts.proxy import Proxy
from rollbook.store.cut import parse_cut
from rollbook.store.errors import RolloutError
from rollbook.store.events import Record, TrajectoryFinished, TurnDelivered, TurnFailed, TurnRequested

KINDS = (TurnRequested.KIND, TurnDelivered.KIND, TurnFailed.KIND, TrajectoryFinished.KIND)
CATCH_UP_S = 60.0
"""So long is waited until the log is read up to where it was, behind a proxy that has much to do."""


@dataclass(slots=True)
class Activity:
    """A trajectory's.

    Attributes:
        last_s: when it was last heard of, of the monotonic clock.
    """

    seen: Seen = field(default_factory=Seen)
    last_s: float = field(default_factory=time.monotonic)


class Watch:
    """Follows the log; of trajectories that nobody asks about it keeps nothing."""

    def __init__(self, proxy: Proxy, run: str, cut: str) -> None:
        self._proxy, self.run, self._cut = proxy, run, cut
        self._of: dict[str, Activity] = {}
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
        return self._of.setdefault(trajectory_id, Activity())

    def end(self, trajectory_id: str) -> None:
        """Nobody asks any more."""
        self._of.pop(trajectory_id, None)

    def seen(self, activity: Activity) -> Seen:
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
        activity = self._of.get(getattr(record, "trajectory_id", ""))
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
