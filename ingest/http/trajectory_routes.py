"""Routes about trajectories: open one, end it, reward it, label it, prefer it to another."""

from __future__ import annotations

import asyncio
import contextlib
from weakref import WeakValueDictionary

import orjson
from fastapi import FastAPI, Request, Response

from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.desk import Desk
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.guard import Guard, caller_of
from rollbook.ingest.http.launch_routes import Book, add_launch_routes
from rollbook.ingest.http.rules import check_source, check_trajectory, check_unfinished
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.run_writer import all_durable
from rollbook.ingest.requests.fields import (
    AddLabel,
    AddPreference,
    AssignReward,
    FinishTrajectory,
    OpenTrajectory,
)
from rollbook.ingest.trajectories.description import description
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.trajectories.rewards import assigned_reward, repeated, turn_of_reply
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, LabelAdded, PreferenceAdded
from rollbook.store.fold.trajectory import Trajectory


def add_trajectory_routes(
    app: FastAPI, recorder: Recorder, door: FrontDoor, guard: Guard, room: BodyRoom
) -> None:
    """Add the routes under /v1/trajectories."""
    desk = Desk(recorder, door, guard, room)
    book = Book(desk)
    _add_course(app, desk, book)
    _add_reading(app, desk)
    _add_remarks(app, desk)
    _add_preferences(app, desk)
    add_launch_routes(app, desk, book)


OPENING = "opening"
"""Label by which a client knows its own request to open a trajectory, and may repeat it."""


def _add_course(app: FastAPI, desk: Desk, book: Book) -> None:
    """A trajectory's beginning and end."""

    def said(live: LiveTrajectory) -> Json:
        name = live.opened.name
        return {"id": name, "trajectory_id": live.opened.trajectory_id, "api_key": desk.guard.key_of(name)}

    @app.post("/v1/trajectories", status_code=201)
    async def open_trajectory(request: Request, response: Response) -> Json:
        body, caller = await desk.read(request, OpenTrajectory), caller_of(request)
        check_trajectory(caller, body.id)
        if (known := await _opened_so(desk, body)) is not None:
            response.status_code = 200
            return said(known)
        # Refuses a name that is taken before there is anything to wait for.
        live = desk.recorder.draft(body, caller.name)
        with contextlib.ExitStack() as places:
            await desk.door.admit(live.opened.name, body, request, places)
            if (known := await _opened_so(desk, body)) is not None:
                response.status_code = 200
                return said(known)
            desk.recorder.draft(body)  # refuses a name that was taken meanwhile
            opening = desk.recorder.record_opening(live)
            book.opened(live.opened.trajectory_id)
        await all_durable([opening])
        return said(live)

    @app.post("/v1/trajectories/{name:path}/finish")
    async def finish(name: str, request: Request) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        turns = await desk.recorder.finish(name, await desk.read(request, FinishTrajectory), caller.name)
        return {"id": name, "status": "finished", "turns": turns}


async def _opened_so(desk: Desk, body: OpenTrajectory) -> LiveTrajectory | None:
    """The trajectory that this very request opened before: its client did not hear of it, and asks again.

    Only a client that said by which word it asks can be told apart from another of the same name.
    """
    live = None if body.id is None else await desk.recorder.look_up(body.id)
    word = body.labels.get(OPENING)
    if live is None or live.finished or word is None or live.opened.labels.get(OPENING) != word:
        return None
    if live.opening is not None:
        await all_durable([live.opening])
    return live


def _add_reading(app: FastAPI, desk: Desk) -> None:
    """What the log has of one trajectory, for who judges it."""

    @app.get("/v1/trajectories/{name:path}")
    async def read(name: str) -> Response:
        trajectory = await desk.recorded(name)
        said = await asyncio.to_thread(lambda: orjson.dumps(description(trajectory)))
        return Response(said, media_type="application/json")


def _add_remarks(app: FastAPI, desk: Desk) -> None:
    """What anybody says of a trajectory, at any time; but its agent until its end, and as itself.

    A reward that is sent again is one reward: 201 for what is new, 200 for a repetition.
    """
    turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @app.post("/v1/trajectories/{name:path}/rewards", status_code=201)
    async def reward(name: str, request: Request, response: Response) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        body = await desk.read(request, AssignReward)
        check_source(caller, body.source)
        async with turns.setdefault(name, asyncio.Lock()):
            trajectory = await desk.recorded(name)
            record = assigned_reward(trajectory, body, caller.name)
            check_unfinished(caller, name, finished=_is_finished(desk.recorder, trajectory))
            if (event_id := repeated(trajectory, record)) is not None:
                response.status_code = 200
            else:
                [event] = await desk.recorder.write(record)
                event_id = event.event_id
        return {"id": name, "trajectory_id": record.trajectory_id, "event_id": event_id}

    @app.post("/v1/trajectories/{name:path}/labels", status_code=201)
    async def label(name: str, request: Request) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        body = await desk.read(request, AddLabel)
        check_source(caller, body.source)
        trajectory = await desk.recorded(name)
        trajectory_id = trajectory.opened.trajectory_id
        turn_id = turn_of_reply(trajectory, body.turn)
        record = LabelAdded(trajectory_id, turn_id, body.name, body.value, body.source, caller.name)
        check_unfinished(caller, name, finished=_is_finished(desk.recorder, trajectory))
        [event] = await desk.recorder.write(record)
        return {"id": name, "trajectory_id": trajectory_id, "event_id": event.event_id}


def _add_preferences(app: FastAPI, desk: Desk) -> None:
    """What judges say of two trajectories, at any time."""

    @app.post("/v1/preferences", status_code=201)
    async def prefer(request: Request) -> Json:
        caller, body = caller_of(request), await desk.read(request, AddPreference)
        check_source(caller, body.source)
        chosen, rejected = [
            (await desk.recorded(name)).opened.trajectory_id for name in (body.chosen, body.rejected)
        ]
        if chosen == rejected:
            text = f"chosen and rejected are both {body.chosen!r}: a preference is between two trajectories"
            raise RequestError(422, "same_trajectory", text)
        record = PreferenceAdded(chosen, rejected, body.margin, body.source, caller.name)
        [event] = await desk.recorder.write(record)
        return {"trajectory_id": chosen, "rejected_trajectory_id": rejected, "event_id": event.event_id}


def _is_finished(recorder: Recorder, trajectory: Trajectory) -> bool:
    """Whether it has ended by now: here, or by another proxy, of which the log says so.

    Asked with nothing to wait for before the write, or a finish could come in between.
    """
    return trajectory.finished is not None or recorder.known(trajectory.opened.name).finished
