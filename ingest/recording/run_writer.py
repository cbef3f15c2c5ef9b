"""Appends a run's events to a lane, in order. Each client's events are an append of their own; noted events
go along with the next append. Callbacks learn which appends failed and which are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from rollbook.ingest.recording.redact import Redactor
from rollbook.store import Event, Store
from rollbook.store.errors import UnstorableError, WriteFailedError
from rollbook.store.events import Record, TrajectoryOpened
from rollbook.store.log.writer import append_future
from rollbook.store.redaction import scrub_record
from rollbook.store.secret import SECRETS, store_secret

_Append = tuple[list[Event], "Future[int]"]
NOTE_S = 0.004
"""Longest time that noted events wait for an append to go with."""


class RunWriter:
    """Writes events of one run into one lane.

    Not thread-safe: it belongs to an event loop.
    """

    def __init__(self, store: Store, lane: str, run: str) -> None:
        self.store, self.run = store, run
        self.writer = store.writer(lane)
        self.lane = self.writer.lane
        self.redactor = Redactor(key=store_secret(store.path, SECRETS))
        """Takes secrets out of errors and settings, for all that record them."""
        self._last: Future[int] | None = None
        self._waiting: dict[Future[int], list[Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._untold: deque[tuple[Future[int], list[Event]]] = deque()
        self._telling: asyncio.TimerHandle | None = None
        self.on_events: Callable[[list[Event]], None] = lambda events: None
        """Called with every event: with an opening as it is noted, with others once they are durable."""
        self.on_unopened: Callable[[str], None] = lambda trajectory_id: None
        """Called with the trajectory of an opening that `on_events` got and that is not in the log after
        all."""
        self.on_lost: Callable[[int], None] = lambda events: None
        """Called, in any thread, with the number of events of a failed append."""

    async def write(self, *records: Record, behind: Iterable[Future[int] | None] = ()) -> list[Event]:
        """Append records together; returns once they are durable.

        Args:
            behind: what they rest on: where one of these appends fails, nothing is written.

        Raises:
            WriteFailedError: they are not durable.
            UnstorableError: one of them, or of what they rest on, has no stored form.
        """
        pending = {base for base in behind if base is not None and (not base.done() or base.exception())}
        events = self._events(records)
        noted = self._waiting.get(next(iter(pending))) if len(pending) == 1 else None
        if noted is not None:
            noted.extend(events)  # has not gone yet: together they are stored, or neither is
            self.flush()
            await all_durable(pending)
        else:
            await all_durable(pending)
            await asyncio.wrap_future(self._append(events))
        self._notify()
        return events

    def append(self, *records: Record) -> Future[int]:
        """Append records at once, behind what was noted; resolved once they are durable."""
        return self._append(self._events(records))

    def note(self, *records: Record) -> Future[int]:
        """Append records without waiting; resolved once they are durable.

        They go beside the next `write`, or by themselves a moment later: one commit instead of two.
        """
        future = append_future()
        self._waiting[future] = self._events(records)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return future
        if self._timer is None:
            self._timer = loop.call_later(NOTE_S, self.flush)
        return future

    def _events(self, records: tuple[Record, ...]) -> list[Event]:
        redactor = self.redactor
        clean = (scrub_record(record, redactor.text, redactor.fields) for record in records)
        events = [Event(record, self.run) for record in clean]
        openings = [event for event in events if isinstance(event.record, TrajectoryOpened)]
        if openings:
            self.on_events(openings)  # at once: admission counts what begins
        return events

    def _append(self, events: list[Event]) -> Future[int]:
        future = append_future()
        self._put([*self._noted(), (events, future)])
        return future

    def _put(self, appends: Sequence[_Append]) -> None:
        """Hand appends to the lane in one call: one after the other they would be a commit each."""
        for events, future in appends:
            # A future keeps its callbacks alive, and these would keep the events alive.
            about = frozenset(filter(None, (getattr(e.record, "trajectory_id", None) for e in events)))
            future.add_done_callback(partial(self._put_down, len(events), about))
        if appends:
            self._last = appends[-1][1]
            self.writer.append_each(appends)
            self._untold += [(future, events) for events, future in appends]
        self._notify()

    def _put_down(self, events: int, about: frozenset[str], future: Future[int]) -> None:
        """Callback of an append, in any thread: pass its outcome to the loop."""
        if future.exception() is not None:
            self.on_lost(events)
            self._doubt(about)

    def _doubt(self, trajectories: frozenset[str]) -> None:
        """Callback of a failed append, in any thread: mark the trajectories that it was about."""

    def _notify(self) -> None:
        """Run the callbacks of finished appends; a lane finishes them in order."""
        while self._untold and self._untold[0][0].done():
            future, events = self._untold.popleft()
            durable = future.exception() is None
            for event in events:
                if isinstance(event.record, TrajectoryOpened):
                    self._opened(event.record.trajectory_id, durable=durable)
                    if not durable:
                        self.on_unopened(event.record.trajectory_id)
            if durable:
                self.on_events([e for e in events if not isinstance(e.record, TrajectoryOpened)])
        if self._untold and self._telling is None:
            with contextlib.suppress(RuntimeError):  # no loop runs: the next append runs them
                self._telling = asyncio.get_running_loop().call_later(NOTE_S, self._tell_later)

    def _tell_later(self) -> None:
        self._telling = None
        self._notify()

    def _opened(self, trajectory_id: str, *, durable: bool) -> None:
        """Callback of an opening: whether it is in the log."""

    def flush(self) -> None:
        """Append what was noted, each client's by itself."""
        self._put(self._noted())

    def _noted(self) -> list[_Append]:
        """What was noted, to be appended now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        noted, self._waiting = self._waiting, {}
        return [(events, future) for future, events in noted.items()]

    async def settle(self) -> None:
        """Wait until what was noted or appended so far is durable, or failed (a lane commits in order)."""
        self.flush()
        if self._last is not None:
            with contextlib.suppress(WriteFailedError, UnstorableError):  # its own client got the error
                await asyncio.wrap_future(self._last)

    def close(self) -> None:
        """Commit what is pending and release the lane."""
        self.flush()
        self.writer.close()


async def all_durable(appends: Iterable[Future[int] | None]) -> None:
    """Return once every append is durable; None stands for one that is.

    Raises:
        WriteFailedError, UnstorableError: one of them is not.
    """
    for append in appends:
        if append is not None:
            await asyncio.wrap_future(append)


def any_lost(appends: Iterable[Future[int] | None]) -> bool:
    """Whether one of the appends is known not to be durable."""
    return any(append is not None and append.done() and append.exception() for append in appends)
