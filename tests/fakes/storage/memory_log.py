"""A log in memory, for tests that need a log and no disk.

`tests/store/contract` runs the same tests over it and over stores on disk: what those ask for is what it
promises, and all that others may rely on.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import pyarrow as pa

from rollbook.store.cut import LANE_NAME, Cut, format_cut, parse_cut
from rollbook.store.errors import CutError, LaneLockedError, WriteFailedError
from rollbook.store.events import BodyStored, Event, StepPlanned, TurnRequested
from rollbook.store.events.batches import encode
from rollbook.store.events.blobs import externalize
from rollbook.store.events.codec import decode
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.log.tail import EVERYTHING, Filter
from rollbook.store.settings import AppendSettings


@dataclass(slots=True)
class _Lane:
    batches: list[pa.RecordBatch] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    writer: MemoryWriter | None = None


class MemoryLog:
    """Has the methods of `rollbook.store.Store` that the contract asks for."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self.gate = threading.RLock()

    def lanes(self) -> list[str]:
        """Names of the lanes that have been opened for writing, sorted."""
        return sorted(self._lanes)

    def head(self) -> dict[str, int]:
        """The cut that holds everything."""
        with self.gate:
            return {name: lane.count for name, lane in self._lanes.items() if lane.count}

    def cut(self, text: str = "head", run: str | None = None) -> dict[str, int]:
        """The cut a text names, as `Store.cut`."""
        if text == "head":
            return self.head()
        cut = self._step_cut(text, run) if text.startswith("step:") else parse_cut(text)
        self._check(cut)
        return cut

    def _step_cut(self, text: str, run: str | None) -> dict[str, int]:
        plans = [e for e in self.events() if isinstance(e.record, StepPlanned) and run in (None, e.run)]
        cuts = {(e.run, e.record.policy): e.record.cut for e in plans if f"step:{e.record.step}" == text}
        if len(cuts) != 1:
            raise CutError(f"cut {text!r}: planned by {sorted(cuts)}, name one run")
        return parse_cut(next(iter(cuts.values())))

    def _check(self, cut: Cut) -> None:
        held = self.head()
        for lane, count in cut.items():
            if count > held.get(lane, 0):
                raise CutError(f"cut {format_cut(cut)!r} holds {count} events of lane {lane!r}: too many")

    def events(self, cut: Cut | None = None, start: Cut | None = None) -> Iterator[Event]:
        """Every event in the cut (default: head) and not in `start`, lane by lane, each in order."""
        cut = self.head() if cut is None else cut
        self._check(cut)
        for name in sorted(cut):
            lane = self._lanes[name]
            batches = list(lane.batches)
            for batch in batches:
                for event in decode(batch, name, lane.bodies.__getitem__):
                    if (start or {}).get(name, 0) <= event.seq < cut[name]:
                        yield event

    def trajectories(
        self, cut: Cut | None = None, ids: Collection[str] | None = None
    ) -> dict[str, Trajectory]:
        """Trajectories at the cut (default: head), by id; only those in `ids`, if given."""
        return fold(
            e for e in self.events(cut) if ids is None or getattr(e.record, "trajectory_id", None) in ids
        )

    def trajectory(self, trajectory_id: str, cut: Cut | None = None) -> Trajectory | None:
        """One trajectory at the cut (default: head), or None."""
        return self.trajectories(cut, [trajectory_id]).get(trajectory_id)

    def tail(self, start: Cut | None = None, wanted: Filter = EVERYTHING) -> MemoryTail:
        """A reader that hands out each event once, from `start` on."""
        self._check(start or {})
        return MemoryTail(self, start or {}, wanted)

    def writer(self, lane: str, settings: AppendSettings | None = None) -> MemoryWriter:
        """Take a lane for writing."""
        if not LANE_NAME.fullmatch(lane):
            raise CutError(f"lane name {lane!r}: use lower-case letters, digits, '.', '_' and '-'")
        with self.gate:
            held = self._lanes.setdefault(lane, _Lane())
            if held.writer is not None:
                raise LaneLockedError(f"lane {lane!r} is being written: close that writer")
            held.writer = MemoryWriter(self, lane, held, settings or AppendSettings())
            return held.writer


class MemoryWriter:
    """Appends at once: its futures are done when it hands them out."""

    def __init__(self, log: MemoryLog, lane: str, held: _Lane, settings: AppendSettings) -> None:
        self.lane, self.failure = lane, None
        self._log, self._held, self._settings = log, held, settings
        self._closed = False

    def append(self, events: Sequence[Event]) -> Future[int]:
        """Append events together; the future gives the first one's sequence number."""
        future: Future[int] = Future()
        try:
            with self._log.gate:
                future.set_result(self._append(events))
        except Exception as error:
            future.set_exception(error)
        return future

    def _append(self, events: Sequence[Event]) -> int:
        if self._closed:
            raise WriteFailedError(f"lane {self.lane!r}: it is closed")
        if not events:
            raise ValueError("append needs at least one event")
        held, bodies = self._held, dict(self._held.bodies)
        rows: list[Event] = []
        numbers: dict[str, int] = {}
        for event in events:
            if event.event_id not in held.numbers and event.event_id not in numbers:
                rows += self._with_bodies(event, bodies)
                numbers[event.event_id] = held.count + len(rows) - 1
        try:
            batch = encode(rows, held.count) if rows else None
        except Exception as error:
            raise ValueError(f"an event cannot be stored: {error}") from error
        if batch is not None:
            held.batches.append(batch)
        held.count += len(rows)
        held.numbers |= numbers
        held.bodies = bodies
        return held.numbers[events[0].event_id]

    def _with_bodies(self, event: Event, bodies: dict[str, Any]) -> list[Event]:
        record = event.record
        if not isinstance(record, TurnRequested):
            return [event]
        stored: list[Event] = []

        def store(digest: str, body: Any) -> None:
            if digest not in bodies:
                bodies[digest] = body
                stored.append(Event(BodyStored(digest, body), event.run, time_us=event.time_us))

        try:
            small = [
                externalize(value, self._settings.body_bytes, store)
                for value in (record.messages, record.request)
            ]
        except TypeError as error:
            raise ValueError(f"an event cannot be stored: {error}") from error
        return [*stored, replace(event, record=replace(record, messages=small[0], request=small[1]))]

    def close(self) -> None:
        """Give the lane back. Safe to call twice."""
        with self._log.gate:
            if not self._closed:
                self._closed, self._held.writer = True, None

    def __enter__(self) -> MemoryWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class MemoryTail:
    """Hands out each event of the log once."""

    def __init__(self, log: MemoryLog, start: Cut, wanted: Filter) -> None:
        self._log, self._wanted = log, wanted
        self._cut = {lane: count for lane, count in start.items() if count}

    def poll(self, limit: int | None = None) -> list[Event]:
        """Events since the last poll, lane by lane; those behind the limit-th come with the next one."""
        head = {k: v for k, v in self._log.head().items() if k not in self._wanted.skip_lanes}
        events: list[Event] = []
        for event in self._log.events(head, self._cut):
            if limit is not None and len(events) >= limit:
                return events
            self._cut[event.lane] = event.seq + 1
            wanted = self._wanted
            if event.kind in (wanted.kinds or {event.kind}) and event.kind not in wanted.without:
                events += [event] if wanted.run in (None, event.run) else []
        return events

    def cut(self) -> dict[str, int]:
        """What has been handed out or passed over so far."""
        return dict(self._cut)
