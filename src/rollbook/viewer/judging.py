"""What people say of trajectories that they read: rewards, labels, preferences, written to the log.

They are the same events as a proxy's (`POST /v1/trajectories/ID/rewards` and its neighbours), in a lane of
the viewer's own. A number that a person gives takes the place of the one that was given under the same name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.guard import caller_of
from rollbook.ingest.access import check_source
from rollbook.ingest.fields import (
    AddLabel,
    AddPreference,
    AssignReward,
    check_recordable,
    json_object,
    validated,
)
from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.trajectories.rewards import assigned_reward
from rollbook.store import Event, Store
from rollbook.store.errors import LaneLockedError, RequestError
from rollbook.store.events import LabelAdded, PreferenceAdded, Record, RewardAssigned
from rollbook.store.fold.trajectory import Trajectory
from rollbook.viewer.pages import Page, Query
from rollbook.viewer.rendering import name_of
from rollbook.viewer.snapshots import Snapshot, Snapshots
from rollbook.viewer.trajectories import absent

LANE = "view"
SOURCE = "human"
"""What a person's rewards and labels are called where the person says nothing else."""
BODY_BYTES = 64 << 10
LOCKED_S = 5.0
"""So long another viewer of the store may take to write."""
_Model = TypeVar("_Model", bound=BaseModel)
_writing = threading.Lock()


# What was said so far -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remark:
    """A reward, a label or a preference of a trajectory.

    Attributes:
        kind: reward, label, preferred or rejected.
        about: the turn that it is of, or the other trajectory of a preference; null: of all of this one.
        name: of a label; value: the number, a label's value, or a preference's margin.
        key: whose API key it came with; null where keys are not checked.
        superseded: a later number took its place.
    """

    kind: str
    about: str | None
    name: str
    value: Any
    source: str
    key: str | None
    time: datetime
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Remarks:
    """What was said of a trajectory, the newest first, and what else can be said."""

    trajectory_id: str
    remarks: Sequence[Remark]
    source: str = SOURCE


_REJECTED = """
    SELECT trajectory_id, margin, source, key, time FROM preferences WHERE rejected_trajectory_id = $id"""


def read_remarks(snapshot: Snapshot, query: Query) -> Remarks:
    """What was said of a trajectory by anybody."""
    trajectory_id = query["trajectory_id"]
    events = snapshot.store.events_about([trajectory_id])
    gone = {e.record.supersedes for e in events if isinstance(e.record, RewardAssigned)}
    remarks = [remark for event in events if (remark := _remark(event, gone)) is not None]
    for row in snapshot.rows(_REJECTED, id=trajectory_id):
        about = row.pop("trajectory_id")
        remarks.append(Remark("rejected", about, "", row.pop("margin"), **row))
    return Remarks(trajectory_id, sorted(remarks, key=lambda remark: remark.time, reverse=True))


def _remark(event: Event, gone: set[str | None]) -> Remark | None:
    at = datetime.fromtimestamp(event.time_us / 1e6, UTC).replace(tzinfo=None)
    match event.record:
        case RewardAssigned() as given:
            late = event.event_id in gone
            return Remark("reward", given.turn_id, "", given.reward, given.source, given.by, at, late)
        case LabelAdded() as label:
            return Remark("label", label.turn_id, label.name, label.value, label.source, label.by, at)
        case PreferenceAdded(rejected_trajectory_id=other) as given:
            return Remark("preferred", other, "", given.margin, given.source, given.by, at)
    return None


# Saying more --------------------------------------------------------------------------------------------


def add_judging(app: FastAPI, snapshots: Snapshots) -> None:
    """Add the routes by which judges reward, label and compare trajectories, named by their ids."""
    room, redactor = BodyBudget(most=BODY_BYTES, total=16 * BODY_BYTES), Redactor()

    def route(path: str, model: type[_Model], record_of: Callable[[Request, _Model], Any]) -> None:
        async def write(request: Request) -> Response:
            async with room.plain(request) as raw:
                fields = json_object(raw)
            check_recordable(fields)
            body = validated(model, redactor.fields(fields))
            check_source(caller_of(request), getattr(body, "source", SOURCE))
            trajectory, record = await run_in_threadpool(record_of, request, body)
            event_id = await run_in_threadpool(_write, snapshots, trajectory, record)
            return JSONResponse({"trajectory_id": record.trajectory_id, "event_id": event_id}, 201)

        app.add_route(path, write, methods=["POST"])

    def reward(request: Request, body: AssignReward) -> tuple[Trajectory, Record]:
        trajectory = _trajectory(snapshots.store, name_of(request.path_params["trajectory_id"]))
        body = body.model_copy(update={"supersedes": body.supersedes or _given_before(trajectory, body)})
        return trajectory, assigned_reward(trajectory, body, caller_of(request).name)

    def label(request: Request, body: AddLabel) -> tuple[Trajectory, Record]:
        trajectory_id, by = name_of(request.path_params["trajectory_id"]), caller_of(request).name
        record = LabelAdded(trajectory_id, body.turn, body.name, body.value, body.source, by)
        return _trajectory(snapshots.store, trajectory_id), record

    def preference(request: Request, body: AddPreference) -> tuple[Trajectory, Record]:
        if body.chosen == body.rejected:
            text = f"chosen and rejected are both {body.chosen!r}: a preference is between two trajectories"
            raise RequestError(422, "same_trajectory", text)
        chosen, _ = [_trajectory(snapshots.store, name) for name in (body.chosen, body.rejected)]
        by = caller_of(request).name
        return chosen, PreferenceAdded(body.chosen, body.rejected, body.margin, body.source, by)

    route("/trajectories/{trajectory_id}/rewards", AssignReward, reward)
    route("/trajectories/{trajectory_id}/labels", AddLabel, label)
    route("/preferences", AddPreference, preference)


def _trajectory(log: Store, trajectory_id: str) -> Trajectory:
    """A trajectory, by its id.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    trajectory = log.trajectory(trajectory_id)
    if trajectory is None:
        raise absent(trajectory_id)
    return trajectory


def _given_before(trajectory: Trajectory, body: AssignReward) -> str | None:
    """The reward whose place this one takes: the last of the same name, of the whole trajectory."""
    if body.turn is not None:
        return None
    known = [event_id for event_id, r in trajectory.rewards if (r.source, r.turn_id) == (body.source, None)]
    return known[-1] if known else None


def _write(snapshots: Snapshots, trajectory: Trajectory, record: Record) -> str:
    """Append a record to the run of its trajectory; the id of its event.

    Raises:
        RequestError: 503, another viewer of the store writes all the time.
    """
    event, until = Event(record, trajectory.run), time.monotonic() + LOCKED_S
    while True:
        try:
            with _writing, snapshots.store.writer(LANE) as writer:
                writer.append([event]).result()
            break
        except LaneLockedError as error:
            if time.monotonic() > until:
                text = f"another viewer has written to lane {LANE!r} for {LOCKED_S:.0f} s: try again"
                raise RequestError(503, "lane_locked", text) from error
            time.sleep(0.05)
    snapshots.outdate()
    return event.event_id


PAGES = (Page("/trajectories/{trajectory_id}/remarks", "remarks.html", read_remarks),)
