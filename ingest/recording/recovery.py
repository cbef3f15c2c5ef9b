"""What a recorder starts with: its run's trajectories, also those that processes which are gone left
open."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollbook.ingest.recording.restore import RunReader, restored
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.trajectories.place import Place
from rollbook.ingest.trajectories.registry import Trajectories
from rollbook.store import Event, Store
from rollbook.store.errors import LaneLockedError
from rollbook.store.events import TrajectoryAdopted
from rollbook.store.log.recovery import may_hold_more, recovered_lane
from rollbook.store.log.writer import LaneWriter


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
                        locks.enter_context(recovered_lane(self.store.path, lane))
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
