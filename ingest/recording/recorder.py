"""The proxy's memory of its trajectories, and the one place that writes their events.

A reply goes out only after every event that it rests on is durable: the trajectory's opening, the request,
the completion. Each client's events are an append of their own, so that what one client sends never decides
what becomes of another's. What is in memory here is a fold of the log: a restarted recorder reads it back and
goes on with the trajectories that are still open. A trajectory of which an append failed is read back too,
before it is used again, so that memory never says more than the log.

Trajectories that had no traffic for too long are finished, so that nothing waits for them for ever.

What a recorder starts with: its run's trajectories, also those that processes which are gone left
open.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from rollbook.ingest.fields import FinishTrajectory, OpenTrajectory
from rollbook.ingest.recording.restore import RunReader, restored
from rollbook.ingest.recording.run_writer import RunWriter, all_durable
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.trajectories.place import ALONE, Place
from rollbook.ingest.trajectories.registry import BUDGET_BYTES, Trajectories
from rollbook.ingest.trajectories.rewards import turn_rewards
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.store import Event, Store
from rollbook.store.errors import EndingError, LaneLockedError, RequestError, StoreError, UnstorableError
from rollbook.store.events import (
    QUARANTINE,
    Json,
    LabelAdded,
    Record,
    RewardAssigned,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDelivered,
)
from rollbook.store.ids import new_id
from rollbook.store.log.recovery import may_hold_more, recovered_lane
from rollbook.store.log.writer import LaneWriter


class Recorder(RunWriter):
    """Opens, extends and finishes trajectories of one run in one lane.

    Not thread-safe: it belongs to the proxy's event loop.

    Args:
        budget: about how many bytes of memory open trajectories may take.
        goes_on: read back what is open in the run, and adopt what a process that is gone left open. Without,
            it knows those alone that it opens itself.
        place: whose trajectories are this recorder's, where several write the run. Others' are looked up in
            the log.
    """

    def __init__(
        self,
        store: Store,
        lane: str,
        run: str,
        budget: int = BUDGET_BYTES,
        *,
        goes_on: bool = True,
        place: Place = ALONE,
    ) -> None:
        super().__init__(store, lane, run)
        self.place = place
        self.trajectories = Trajectories(budget)
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self.adopted: dict[str, int] = {}
        """Lane whose process is gone -> how many open trajectories of it are this recorder's now."""
        self.on_finished: Callable[[str], None] = lambda trajectory_id: None
        """Called with the id of each trajectory that is durably finished."""
        try:
            self.known_run = RunReader(store, run)
            if goes_on:
                begun = RunRecovery(store, self.writer, run, place, budget)
                self.trajectories, self.adopted = begun.restored(self.known_run), begun.adopted
        except BaseException:
            self.writer.close()
            raise

    def _doubt(self, trajectories: frozenset[str]) -> None:
        for trajectory_id in trajectories:
            live = self.trajectories.by_id(trajectory_id)
            if live is not None:
                live.doubtful = True

    def _opened(self, trajectory_id: str, *, durable: bool) -> None:
        live = self.trajectories.by_id(trajectory_id)
        if live is None:
            return
        if durable:
            live.opening = None
        else:
            self.trajectories.remove(live)

    # Trajectories -----------------------------------------------------------------------------

    async def look_up(self, name: str) -> LiveTrajectory | None:
        """The run's trajectory of that name, or None: `known` says the same until the caller waits again."""
        while (live := self._named(name)) is None and self._may_hold(name):
            opening = await asyncio.to_thread(self.store.opening, self.run, name)
            if opening is not None:
                self.trajectories.ended.add(*opening)
            elif self._named(name) is None:
                return None
        return live

    def _may_hold(self, name: str) -> bool:
        """Whether the log may hold a trajectory of that name, which is not in memory."""
        return not self.place.remembers(name) or self.trajectories.ended.may_hold(name)

    async def recall(self, name: str) -> LiveTrajectory | None:
        """`look_up`, with the trajectory's contents if it can be extended: as the log has it.

        Raises:
            WriteFailedError: its opening did not become durable.
            RequestError: 404, the log has it no more.
        """
        while True:
            live = await self.look_up(name)
            if live is None or live.finished or live.lane != self.lane:
                return live
            if live.opening is not None:  # nothing is written to a trajectory whose opening may still fail
                with contextlib.suppress(UnstorableError):  # the request that opens it gets the error
                    await all_durable([live.opening])
            elif live.contents is None or live.doubtful:
                await self._read_back(live)
            else:
                self.trajectories.used(live)
                return live

    async def _read_back(self, live: LiveTrajectory) -> None:
        """Reload a trajectory's contents from the log; concurrent callers share one read."""
        trajectory_id = live.opened.trajectory_id
        task = self._restoring.get(trajectory_id)
        if task is None:
            task = self._restoring[trajectory_id] = asyncio.create_task(self._restored(live))
            task.add_done_callback(partial(self._has_read, trajectory_id))
        await asyncio.shield(task)

    def _has_read(self, trajectory_id: str, task: asyncio.Task[None]) -> None:
        del self._restoring[trajectory_id]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, where no request waits any more

    async def _restored(self, live: LiveTrajectory) -> None:
        doubtful, live.doubtful = live.doubtful, False  # an append that fails from here on sets it again
        try:
            while True:
                changes = live.changes
                await self.settle()
                trajectory = await asyncio.to_thread(self.store.trajectory, live.opened.trajectory_id)
                if trajectory is None:
                    text = f"trajectory {live.opened.name!r} is no longer in the store"
                    raise RequestError(404, "trajectory_dropped", text)
                contents = await asyncio.to_thread(restored, trajectory)
                if live.changes == changes:
                    break
        except BaseException:
            live.doubtful = live.doubtful or doubtful
            raise
        if trajectory.finished is not None:
            self._ended(live)
            return
        if doubtful:
            live.opened = trajectory.opened
        self.trajectories.restore(live, contents)

    def draft(self, wanted: OpenTrajectory, by: str | None = None) -> LiveTrajectory:
        """A trajectory that is not recorded before `record_opening`: its first request may be refused.

        Args:
            by: the name of the key that opens it.

        Raises:
            RequestError: 409, the run has one of that name; 503, names like that are another's now.
        """
        trajectory_id = new_id() if wanted.id else self.place.new_name()
        name = wanted.id or trajectory_id
        if self._named(name) is not None:
            text = f"trajectory {name!r} exists in run {self.run!r}: choose another id"
            raise RequestError(409, "trajectory_exists", text)
        self._check_place(name)
        details = (wanted.group, wanted.task, wanted.split, wanted.labels)
        judged = None if wanted.judges is None else {"trajectory_id": wanted.judges, "how": "judged"}
        opened = TrajectoryOpened(trajectory_id, name, *details, by, judged)
        return LiveTrajectory(opened, self.lane)

    def record_opening(self, live: LiveTrajectory, *records: Record) -> Future[int]:
        """Note records of a trajectory, with its opening if it is only drafted: then all are stored, or none.

        A trajectory whose opening is not durable is unknown again: its name is free, and its calls fail.

        Raises:
            EndingError: names like that are another's now.
        """
        if self._named(live.opened.name) is not None:
            return self.note(*records)
        self._check_place(live.opened.name)
        self.trajectories.add(live)
        live.opening = self.note(live.opened, *records)
        return live.opening

    def _check_place(self, name: str) -> None:
        """See that a new trajectory may have this name here: meanwhile it may have become another's.

        Raises:
            EndingError: it has.
        """
        if not self.place.owns(name):
            text = f"trajectory {name!r} is another proxy's to open now: try again"
            raise EndingError(503, "proxy_away", text)

    def _named(self, name: str) -> LiveTrajectory | None:
        """The trajectory of that name, if its opening is in the log or on its way there."""
        live = self.trajectories.get(name)
        if live is not None and live.opening is not None and live.opening.done():
            if live.opening.exception() is not None:
                self.trajectories.remove(live)
                return None
            live.opening = None
        return live

    def unnamed(self, hashes: Sequence[bytes], by: str | None = None) -> LiveTrajectory:
        """The quarantined trajectory that messages with these hashes go on from, or a new one.

        Traffic that names no trajectory is kept, apart: each conversation in one of its own, never trained.
        """
        for tip in reversed(hashes[1:-1]):
            live = self.trajectories.of_tip(tip)
            if live is not None and not live.finished and self._named(live.opened.name) is live:
                return live
        trajectory_id = new_id()
        opened = TrajectoryOpened(trajectory_id, f"{QUARANTINE}/{trajectory_id}", split=QUARANTINE, by=by)
        return LiveTrajectory(opened, self.lane)

    def is_open(self, live: LiveTrajectory) -> bool:
        """Whether it is recorded, or on its way there, and not finished; one that is only drafted is not."""
        return self.trajectories.by_id(live.opened.trajectory_id) is live

    def of_turn(self, turn_id: str) -> LiveTrajectory | None:
        """The open trajectory that has this turn."""
        return self.trajectories.of_turn(turn_id)

    def open_trajectories(self) -> list[LiveTrajectory]:
        """The trajectories of this lane that are not finished."""
        return [live for live in self.trajectories.open() if live.lane == self.lane]

    async def answered(self, live: LiveTrajectory, turn_ids: tuple[str, ...]) -> list[CompletedTurn]:
        """Completed turns as the log has them.

        Raises:
            RequestError: 404, the log has them no more.
        """
        live.holds += 1
        try:
            await self.settle()
            trajectory = await asyncio.to_thread(self.store.trajectory, live.opened.trajectory_id)
        finally:
            live.holds -= 1
        turns = [] if trajectory is None else [trajectory.turns.get(turn_id) for turn_id in turn_ids]
        completed = [CompletedTurn(t.requested, t.completed) for t in turns if t is not None and t.completed]
        if len(completed) < len(turn_ids):
            text = f"no completed turn {turn_ids[len(completed)]!r} in trajectory {live.opened.name!r}"
            raise RequestError(404, "unknown_turn", text)
        return completed

    async def abandon(self, live: LiveTrajectory) -> None:
        """Finish a trajectory that had no traffic for too long, as aborted."""
        label = LabelAdded(live.opened.trajectory_id, None, "abandoned", True, "rollbook")
        self.note(label)
        await self.finish(live.opened.name, FinishTrajectory(status="aborted"))

    def known(self, name: str) -> LiveTrajectory:
        """The trajectory of that name in this run, whichever proxy writes it, once it is recalled.

        Raises:
            RequestError: 404, the run has none.
        """
        live = self._named(name)
        if live is None:
            text = f"no trajectory {name!r} in run {self.run!r}"
            raise RequestError(404, "unknown_trajectory", text)
        return live

    def find(self, name: str) -> LiveTrajectory | None:
        """The trajectory of that name in this run, read back, for a request that will extend it.

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
        live = await self._to_finish(name)
        try:
            trajectory_id = live.opened.trajectory_id
            records: list[Record] = [*turn_rewards(live.known, trajectory_id, body.turn_rewards, by)]
            if body.reward is not None:
                records.append(RewardAssigned(trajectory_id, None, body.reward, by=by))
            records.append(TrajectoryFinished(trajectory_id, body.status, body.success, by))
            turns = len(live.known.completed)
            await self.write(*records, behind=[live.opening])
        except BaseException as error:
            live.finished = False
            if isinstance(error, asyncio.CancelledError):
                live.doubtful = True  # it may be durable yet
            raise
        self._ended(live)
        return turns

    async def _to_finish(self, name: str) -> LiveTrajectory:
        """The trajectory of that name, in which nothing is under way any more, and nothing more begins.

        Raises:
            RequestError: 404 unknown, 409 finished already or still answering.
        """
        while True:
            await self.recall(name)
            live = self._ours(self.known(name))
            if live.finished:
                raise RequestError(409, "trajectory_finished", f"trajectory {name!r} is finished already")
            if live.calls and all(call.abandoned for call in live.calls):
                # Their clients have gone and the engine was asked to stop, which takes a moment.
                await asyncio.wait([call.done for call in live.calls])
                continue
            if live.running:
                text = f"trajectory {name!r} has {live.running} running requests: await their replies"
                raise RequestError(409, "trajectory_busy", text)
            live.finished = True
            try:
                await live.all_sent()  # a reply whose last byte is on its way is delivered before the end
            except BaseException:
                live.finished = False
                raise
            if not live.doubtful:
                return live
            live.finished = False

    def _ended(self, live: LiveTrajectory) -> None:
        self.trajectories.end(live)
        self.on_finished(live.opened.trajectory_id)

    def mark_delivered(self, live: LiveTrajectory, turn_id: str, how: str) -> None:
        """Note that a client has a turn's reply (once)."""
        if live.contents is not None and turn_id not in live.contents.delivered:
            live.contents.delivered.add(turn_id)
            live.changes += 1
            self.note(TurnDelivered(live.opened.trajectory_id, turn_id, how))


EVERY_S = 5.0


async def sweep(recorder: Recorder, abandoned_s: float) -> None:
    """Finish abandoned trajectories as aborted, until cancelled; with 0 seconds none is."""
    while abandoned_s:
        await asyncio.sleep(min(EVERY_S, abandoned_s))
        late = time.monotonic() - abandoned_s
        for live in recorder.open_trajectories():
            if not live.running and not live.sending and live.active_s < late:
                with contextlib.suppress(RequestError, StoreError, OSError):  # retried in the next round
                    await recorder.abandon(live)


@dataclass(slots=True, eq=False)
class RunRecovery:
    """Reads back what a recorder owns.

    Attributes:
        place: says which trajectories those are.
        budget: about how many bytes the contents of open ones may take.
        running: the recorder has been going on for a while, and knows what is in its own lane.
        adopted: lane whose process is gone -> how many of its open trajectories are adopted.
    """

    store: Store
    writer: LaneWriter
    run: str
    place: Place
    budget: int
    running: bool = False
    adopted: dict[str, int] = field(default_factory=dict)

    def restored(self, runs: RunReader) -> Trajectories:
        """Of finished trajectories the name, of open ones all of it: see `taken_over`."""
        known = self.taken_over(runs)
        known.ended.sealed, ended = runs.ended()
        for opened, lane in ended:
            if self.place.owns(opened.name):
                known.ended.add(opened, lane)
        return known

    def taken_over(self, runs: RunReader) -> Trajectories:
        """The open trajectories, all of each.

        Those of lanes whose process is gone are adopted. Their lanes' locks are held meanwhile: taking
        one recovers what the lane holds beyond its watermark, so that nothing appears in it later. That may
        be an opening, of whose trajectory nothing else is to be seen.
        """
        tried = {self.writer.lane}
        with contextlib.ExitStack() as locks:
            self._recover_killed()
            runs.refresh()
            known, last = self._open(runs)
            while lanes := {live.lane for live in known.open()} - tried:
                tried |= lanes
                for lane in sorted(lanes):
                    try:
                        locks.enter_context(self.store.taken_over(lane))
                    except LaneLockedError:
                        continue  # its process is alive and owns its trajectories
                    self.adopted[lane] = 0
                runs.refresh()
                known, last = self._open(runs)
            self._adopt(known, last)
        return known

    def _recover_killed(self) -> None:
        """Recover the lanes whose process was killed as it wrote: what it wrote counts from now on."""
        for lane in self.store.lanes():
            if lane != self.writer.lane and may_hold_more(self.store.path, lane):
                with contextlib.suppress(LaneLockedError), recovered_lane(self.store.path, lane):
                    pass

    def _open(self, runs: RunReader) -> tuple[Trajectories, dict[str, str]]:
        """(what is open, the last event of each)"""
        known, last = Trajectories(self.budget), dict[str, str]()
        for trajectory in runs.open():
            opened, own = trajectory.opened, trajectory.lane == self.writer.lane
            # With what it wrote while it stood in for another one it goes on too.
            wanted = not self.running if own else self.place.owns(opened.name)
            if not wanted:
                continue
            live = LiveTrajectory(opened, trajectory.lane, contents=None)
            last[opened.trajectory_id] = trajectory.last_event_id
            known.add(live)
            if own or trajectory.lane in self.adopted:
                known.restore(live, restored(trajectory))
        return known, last

    def _adopt(self, known: Trajectories, last: Mapping[str, str]) -> None:
        """Adopt the open trajectories of lanes whose process is gone."""
        records = []
        for live in known.open():
            if live.lane in self.adopted:
                trajectory_id = live.opened.trajectory_id
                records.append(TrajectoryAdopted(trajectory_id, live.lane, last[trajectory_id]))
                self.adopted[live.lane] += 1
                live.lane = self.writer.lane
        if records:
            self.writer.append([Event(record, self.run) for record in records]).result()
