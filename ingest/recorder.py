"""The proxy's memory of its trajectories, and the one place that writes their events.

A reply goes out only after every event that it rests on is durable: the trajectory's opening, the request,
the completion. Each client's events are an append of their own, so that what one client sends never decides
what becomes of another's. What is in memory here is a fold of the log: a restarted recorder reads it back and
goes on with the trajectories that are still open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rollbook.ingest.answered import AnsweredTurn
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.redact import Redactor
from rollbook.ingest.requests import FinishTrajectory, OpenTrajectory
from rollbook.ingest.restore import RunReader, restored
from rollbook.ingest.rewards import turn_rewards
from rollbook.ingest.tokens.normal_form import chain_all
from rollbook.store import Event, Store
from rollbook.store.errors import LaneLockedError, RequestError, UnstorableError
from rollbook.store.events import (
    QUARANTINE,
    Json,
    LabelAdded,
    Record,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDelivered,
)
from rollbook.store.ids import new_id
from rollbook.store.lane.writer import append_future
from rollbook.store.redaction import cleaned
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.trajectory import Trajectory
from rollbook.store.upkeep_events import TrajectoryAdopted

NOTE_S = 0.004
"""How long what was noted may wait for a write to go with."""
TIPS_KEPT = 65536
"""Ends of quarantined conversations that are remembered."""


class Recorder:
    """Opens, extends and finishes trajectories of one run in one lane.

    Not thread-safe: it belongs to the proxy's event loop.
    """

    def __init__(self, store: Store, lane: str, run: str) -> None:
        self.store, self.lane, self.run = store, lane, run
        self.writer = store.writer(lane)
        self.redactor = Redactor(key=store_secret(store.path, SECRETS))
        """Takes secrets out of errors and settings, whoever records them."""
        self._by_name: dict[str, LiveTrajectory] = {}
        self._last: Future[int] | None = None
        self._waiting: dict[Future[int], list[Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tips: dict[bytes, LiveTrajectory] = {}
        self.adopted: dict[str, int] = {}
        """Lane whose process is gone -> how many open trajectories of it are this recorder's now."""
        self.on_events: Callable[[list[Event]], None] = lambda events: None
        """Told of every event as it is appended or noted."""
        self.on_lost: Callable[[int], None] = lambda events: None
        """Told, in any thread, how many events of an append that failed are not in the log."""
        try:
            self._restore()
        except BaseException:
            self.writer.close()
            raise

    def _restore(self) -> None:
        """Read back the run's trajectories: of finished ones the name, of open ones all of it.

        Open ones of lanes whose process is gone are adopted. Their lanes' locks are held meanwhile: taking
        one recovers what the lane holds beyond its watermark, so that nothing appears in it later.
        """
        runs = self.known_run = RunReader(self.store, self.run)
        tried = {self.lane}
        with contextlib.ExitStack() as locks:
            while lanes := {t.lane for t in runs.open()} - tried:
                tried |= lanes
                for lane in sorted(lanes):
                    try:
                        locks.enter_context(self.store.writer(lane))
                    except LaneLockedError:
                        continue  # its process lives, and answers for its trajectories
                    self.adopted[lane] = 0
                runs.refresh()
            adopted = [t for t in runs.open() if t.lane in self.adopted]
            for trajectory in adopted:
                self.adopted[trajectory.lane] += 1
            self._record_adoptions(adopted)
        for opened, lane in runs.opened.values():
            self._by_name[opened.name] = LiveTrajectory(opened, lane, finished=True)
        for trajectory in runs.open():
            lane = self.lane if trajectory.lane in self.adopted else trajectory.lane
            self._by_name[trajectory.opened.name] = restored(trajectory, lane, self._tips)

    def _record_adoptions(self, trajectories: list[Trajectory]) -> None:
        records = [TrajectoryAdopted(t.opened.trajectory_id, t.lane, t.last_event_id) for t in trajectories]
        if records:
            self.writer.append([Event(record, self.run) for record in records]).result()

    async def write(self, *records: Record, behind: Iterable[Future[int] | None] = ()) -> list[Event]:
        """Append records together; returns once they are durable.

        Args:
            behind: what they rest on: where one of these appends fails, nothing is written.

        Raises:
            WriteFailedError: they are not durable.
            UnstorableError: one of them, or of what they rest on, has no stored form.
        """
        pending = {append for append in behind if append is not None and not _durable(append)}
        events = self._events(records)
        noted = self._waiting.get(next(iter(pending))) if len(pending) == 1 else None
        if noted is not None:
            noted.extend(events)  # has not gone yet: together they are stored, or neither is
            self.flush()
            await all_durable(pending)
        else:
            await all_durable(pending)
            await asyncio.wrap_future(self._append(events))
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
        clean = (cleaned(record, redactor.text, redactor.fields) for record in records)
        events = [Event(record, self.run) for record in clean]
        self.on_events(events)
        return events

    def _append(self, events: list[Event]) -> Future[int]:
        self.flush()
        return self._put(events, append_future())

    def _put(self, events: list[Event], future: Future[int]) -> Future[int]:
        future.add_done_callback(partial(self._put_down, len(events)))
        self._last = self.writer.append(events, future)
        return future

    def _put_down(self, events: int, future: Future[int]) -> None:
        if future.exception() is not None:
            self.on_lost(events)

    def flush(self) -> None:
        """Append what was noted, each client's by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        noted, self._waiting = self._waiting, {}
        for future, events in noted.items():
            self._put(events, future)

    async def settle(self) -> None:
        """Wait until what was noted or appended so far is durable, or was refused (a lane commits in order).

        Raises:
            WriteFailedError: the lane takes nothing more.
        """
        self.flush()
        if self._last is not None:
            with contextlib.suppress(UnstorableError):  # its own client was told
                await asyncio.wrap_future(self._last)

    # Trajectories -----------------------------------------------------------------------------

    def draft(self, wanted: OpenTrajectory, by: str | None = None) -> LiveTrajectory:
        """A trajectory that is not recorded before `record_opening`: its first request may be refused.

        Args:
            by: the name of the key that opens it.

        Raises:
            RequestError: 409, the run has one of that name.
        """
        trajectory_id = new_id()
        name = wanted.id or trajectory_id
        if self._named(name) is not None:
            text = f"trajectory {name!r} exists in run {self.run!r}: choose another id"
            raise RequestError(409, "trajectory_exists", text)
        said = (wanted.group, wanted.task, wanted.split, wanted.labels)
        opened = TrajectoryOpened(trajectory_id, name, *said, by)
        return LiveTrajectory(opened, self.lane)

    def record_opening(self, live: LiveTrajectory, *records: Record) -> Future[int]:
        """Note records of a trajectory, with its opening if it is only drafted: then all are stored, or none.

        A trajectory whose opening is not durable is unknown again: its name is free, and its calls fail.
        """
        if self._named(live.opened.name) is not None:
            return self.note(*records)
        self._by_name[live.opened.name] = live
        live.opening = self.note(live.opened, *records)
        return live.opening

    def _named(self, name: str) -> LiveTrajectory | None:
        """The trajectory of that name, if its opening is in the log or on its way there."""
        live = self._by_name.get(name)
        if live is not None and live.opening is not None and live.opening.done():
            if live.opening.exception() is not None:
                del self._by_name[name]
                return None
            live.opening = None
        return live

    def unnamed(self, messages: list[Json], by: str | None = None) -> LiveTrajectory:
        """The quarantined trajectory that these messages go on from, or a new one.

        Traffic that names no trajectory is kept, apart: each conversation in one of its own, never trained.
        """
        while len(self._tips) > TIPS_KEPT:
            del self._tips[next(iter(self._tips))]
        for tip in reversed(chain_all(messages)[1:-1]):
            live = self._tips.get(tip)
            if live is not None and not live.finished and self._named(live.opened.name) is live:
                return live
        trajectory_id = new_id()
        opened = TrajectoryOpened(trajectory_id, f"{QUARANTINE}/{trajectory_id}", split=QUARANTINE, by=by)
        return LiveTrajectory(opened, self.lane, tips=self._tips)

    def of_turn(self, turn_id: str) -> LiveTrajectory | None:
        """The open trajectory that has this turn."""
        return next((t for t in self._by_name.values() if t.tree.by_id(turn_id)), None)

    def open_trajectories(self) -> list[LiveTrajectory]:
        """Those of this lane that are not finished."""
        return [t for t in self._by_name.values() if not t.finished and t.lane == self.lane]

    async def answered(self, live: LiveTrajectory, turn_ids: tuple[str, ...]) -> list[AnsweredTurn]:
        """Completed turns as the log has them.

        Raises:
            RequestError: 404, the log has them no more.
        """
        await self.settle()
        trajectory = await asyncio.to_thread(self.store.trajectory, live.opened.trajectory_id)
        found = [] if trajectory is None else [trajectory.turns.get(turn_id) for turn_id in turn_ids]
        made = [AnsweredTurn(t.requested, t.completed) for t in found if t is not None and t.completed]
        if len(made) < len(turn_ids):
            text = f"no completed turn {turn_ids[len(made)]!r} in trajectory {live.opened.name!r}"
            raise RequestError(404, "unknown_turn", text)
        return made

    async def abandon(self, live: LiveTrajectory) -> None:
        """Finish a trajectory whose agent was not heard of for too long."""
        label = LabelAdded(live.opened.trajectory_id, None, "abandoned", True, "rollbook")
        self.note(label)
        await self.finish(live.opened.name, FinishTrajectory(status="aborted"))

    def known(self, name: str) -> LiveTrajectory:
        """The trajectory of that name in this run, whichever proxy writes it.

        Raises:
            RequestError: 404, the run has none.
        """
        live = self._named(name)
        if live is None:
            text = f"no trajectory {name!r} in run {self.run!r}"
            raise RequestError(404, "unknown_trajectory", text)
        return live

    def find(self, name: str) -> LiveTrajectory | None:
        """The trajectory of that name in this run, for whoever is about to extend it.

        Raises:
            RequestError: 409, another proxy writes it.
        """
        live = self._named(name)
        return None if live is None else self._ours(live)

    def relabelled(self, live: LiveTrajectory, labels: Json, by: str | None = None) -> Future[int] | None:
        """Note labels that a request gives its trajectory beyond those it was opened with, if any."""
        new = {k: v for k, v in labels.items() if live.opened.labels.get(k) != v}
        if not new or self._named(live.opened.name) is None:
            return None
        noted = self.note(*(LabelAdded(live.opened.trajectory_id, None, k, v, by=by) for k, v in new.items()))
        live.opened = replace(live.opened, labels=live.opened.labels | new)
        return noted

    def _ours(self, live: LiveTrajectory) -> LiveTrajectory:
        if live.lane != self.lane and not live.finished:
            name = live.opened.name
            text = f"trajectory {name!r} is written by the proxy of lane {live.lane!r}: send it there"
            raise RequestError(409, "other_lane", text)
        return live

    async def finish(self, name: str, body: FinishTrajectory, by: str | None = None) -> int:
        """Record the outcome and rewards; no turns may follow. The number of completed turns.

        Args:
            by: the name of the key that ends it.

        Raises:
            RequestError: 404 unknown, 409 finished already or still answering, 422 rewards do not fit.
        """
        live = self._ours(self.known(name))
        while live.calls and all(call.abandoned for call in live.calls):
            # Their clients have gone, and the engine was told to stop: it takes a moment.
            await asyncio.wait([call.done for call in live.calls])
        if live.finished:
            raise RequestError(409, "trajectory_finished", f"trajectory {name!r} is finished already")
        if live.running:
            text = f"trajectory {name!r} has {live.running} running requests: await their replies"
            raise RequestError(409, "trajectory_busy", text)
        records: list[Record] = [*turn_rewards(live, body.turn_rewards, by)]
        trajectory_id = live.opened.trajectory_id
        if body.reward is not None:
            records.append(RewardAssigned(trajectory_id, None, body.reward, by=by))
        records.append(TrajectoryFinished(trajectory_id, body.status, body.success, by))
        live.finished = True
        try:
            while live.sending:  # a reply whose last byte is on its way is delivered before the end
                live.settled.clear()
                await live.settled.wait()
            await self.write(*records, behind=[live.opening])
        except BaseException:
            live.finished = False
            raise
        turns = len(live.completed)
        live.forget()
        return turns

    def mark_delivered(self, live: LiveTrajectory, turn_id: str, how: str) -> None:
        """Note that a client has a turn's reply (once)."""
        if turn_id not in live.delivered:
            live.delivered.add(turn_id)
            self.note(TurnDelivered(live.opened.trajectory_id, turn_id, how))

    def close(self) -> None:
        """Commit what is pending and give the lane back."""
        self.flush()
        self.writer.close()


def _durable(append: Future[int]) -> bool:
    return append.done() and append.exception() is None


async def all_durable(appends: Iterable[Future[int] | None]) -> None:
    """Return once every append is durable; None is one that was long ago.

    Raises:
        WriteFailedError, UnstorableError: one of them is not.
    """
    for append in appends:
        if append is not None:
            await asyncio.wrap_future(append)


def any_lost(appends: Iterable[Future[int] | None]) -> bool:
    """Whether one of the appends is known not to be durable."""
    return any(append is not None and append.done() and append.exception() for append in appends)
