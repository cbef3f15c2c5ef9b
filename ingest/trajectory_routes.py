"""Routes about trajectories: open one, end it, reward it, label it."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request

from rollbook.ingest.front_door import BodyRoom, FrontDoor
from rollbook.ingest.identity import key_name, trajectory_key
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.requests import (
    AddLabel,
    AssignReward,
    FinishTrajectory,
    Model,
    OpenTrajectory,
    check_recordable,
    json_object,
    validated,
)
from rollbook.ingest.rewards import assigned_reward, turn_of_reply
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, LabelAdded
from rollbook.store.trajectory import Trajectory


def add_trajectory_routes(app: FastAPI, recorder: Recorder, door: FrontDoor) -> None:
    """Add the routes under /v1/trajectories."""
    room = BodyRoom(door.options)

    async def read(request: Request, model: type[Model]) -> Model:
        door.check(request)
        async with room.body(request) as raw:
            body = json_object(raw)
        check_recordable(body)
        names = {k: v for k, v in body.items() if k == "id"}
        return validated(model, door.options.redactor.body(body) | names)

    def enter(request: Request, name: str | None) -> None:
        owner = key_name(door.check(request))
        if owner is not None and owner != name and door.options.api_keys:
            text = f"this API key is of trajectory {owner!r} alone"
            raise RequestError(403, "other_trajectory", text)

    @app.post("/v1/trajectories", status_code=201)
    async def open_trajectory(request: Request) -> Json:
        body = await read(request, OpenTrajectory)
        enter(request, body.id)
        live = recorder.draft(body)
        recorder.record_opening(live)
        await recorder.settle()
        name = live.opened.name
        secret = next(iter(door.options.api_keys), None)
        key = trajectory_key(name, recorder.run, secret)
        return {"id": name, "trajectory_id": live.opened.trajectory_id, "api_key": key}

    @app.post("/v1/trajectories/{name:path}/finish")
    async def finish(name: str, request: Request) -> Json:
        enter(request, name)
        turns = await recorder.finish(name, await read(request, FinishTrajectory))
        return {"id": name, "status": "finished", "turns": turns}

    @app.post("/v1/trajectories/{name:path}/rewards", status_code=201)
    async def reward(name: str, request: Request) -> Json:
        enter(request, name)
        body = await read(request, AssignReward)
        trajectory = await _recorded(recorder, name)
        [event] = await recorder.write(assigned_reward(trajectory, body))
        return {"id": name, "trajectory_id": trajectory.opened.trajectory_id, "event_id": event.event_id}

    @app.post("/v1/trajectories/{name:path}/labels", status_code=201)
    async def label(name: str, request: Request) -> Json:
        enter(request, name)
        body = await read(request, AddLabel)
        check_recordable(body.value)
        trajectory = await _recorded(recorder, name)
        trajectory_id = trajectory.opened.trajectory_id
        turn_id = turn_of_reply(trajectory, body.turn)
        [event] = await recorder.write(LabelAdded(trajectory_id, turn_id, body.name, body.value, body.source))
        return {"id": name, "trajectory_id": trajectory_id, "event_id": event.event_id}


async def _recorded(recorder: Recorder, name: str) -> Trajectory:
    """The trajectory as the log has it: of a finished one only the name is in memory.

    Raises:
        RequestError: 404, there is none.
    """
    opened = recorder.known(name).opened
    await recorder.settle()
    trajectory = await asyncio.to_thread(recorder.store.trajectory, opened.trajectory_id)
    if trajectory is None:
        text = f"trajectory {name!r} is no longer in the store: its events were dropped by retention"
        raise RequestError(404, "trajectory_dropped", text)
    return trajectory
