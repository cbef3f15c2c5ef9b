"""A recorder that takes over from others while it runs, and that looks again at what others write."""

from __future__ import annotations

import asyncio
import sys

from rollbook.ingest.recording.going_on import GoingOn
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.trajectories.registry import Trajectories
from rollbook.ingest.workers.place import Place


async def take_place(recorder: Recorder, place: Place) -> RunReader:
    """Let a recorder have another place from now on, and adopt what processes that are gone left open in it.

    Returns:
        What there is in the run.
    """
    store, run, known = recorder.store, recorder.run, recorder.trajectories
    # Without a bound, as it is taken by the registry that has one: that also keeps who has which turn.
    begun = GoingOn(store, recorder.writer, run, place, sys.maxsize, running=True)

    def read() -> tuple[RunReader, Trajectories]:
        runs = RunReader(store, run)
        return runs, begun.taken_over(runs)

    runs, found = await asyncio.to_thread(read)
    for live in list(known.open()):
        other = live.lane != recorder.lane and place.owns(live.opened.name)
        if other and found.by_id(live.opened.trajectory_id) is None:
            known.end(live)  # by another one, and it may be gone since
    for live in found.open():
        earlier = known.by_id(live.opened.trajectory_id)
        if earlier is None or earlier.lane != recorder.lane:
            known.add(live)
    recorder.place = place
    return runs


async def look_again(recorder: Recorder, name: str) -> None:
    """See in the log what has become of an open trajectory in the lane of another process."""
    live = recorder.trajectories.get(name)
    if live is None or live.finished or live.lane == recorder.lane:
        return
    trajectory = await asyncio.to_thread(recorder.store.trajectory, live.opened.trajectory_id)
    if not recorder.is_open(live) or live.lane == recorder.lane:
        return  # it was adopted meanwhile
    if trajectory is None or trajectory.finished is not None:
        recorder.trajectories.end(live)
    else:
        live.lane = trajectory.lane
