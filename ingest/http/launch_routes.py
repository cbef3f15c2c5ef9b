"""Routes for who starts agents: that one was started for a trajectory, how it ended, what it left behind; and
that those which were to be evaluated have been.

They work before and after the trajectory's finish. The trajectory's own key does not open them: what it is
given to cannot speak for who started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response

from rollbook.ingest.http.desk import Desk
from rollbook.ingest.http.guard import caller_of
from rollbook.ingest.requests.launch_fields import EndLaunch, StartLaunch, TellEvaluated, TellLeaks
from rollbook.ingest.trajectories.launches import Launch
from rollbook.store.events import EvalSampled, Json, Record
from rollbook.store.ids import new_id


class _Book:
    """Writes what is said of launches, each thing once.

    What is said of one trajectory at a time is said one after the other: in between the log is read. (A
    launcher speaks to one proxy; of two ends told to two proxies at the same time the view takes the first.)
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def say(
        self, name: str, launch_id: str, response: Response, made: Callable[[Launch], Record | str]
    ) -> Json:
        """Write the record that `made` makes of the launch, unless it finds that an event says so already."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            trajectory_id, events = await self._desk.events(name)
            said = made(Launch.among(events, name, trajectory_id, launch_id))
            if isinstance(said, str):
                event_id, response.status_code = said, 200
            else:
                [event] = await self._desk.recorder.write(said)
                event_id = event.event_id
        return {"id": name, "trajectory_id": trajectory_id, "launch_id": launch_id, "event_id": event_id}


def add_launch_routes(app: FastAPI, desk: Desk) -> None:
    """Add the routes under /v1/trajectories/{name}/launches: 201 for what is new, 200 for a repetition."""
    book = _Book(desk)

    @app.post("/v1/trajectories/{name:path}/launches", status_code=201)
    async def start(name: str, request: Request, response: Response) -> Json:
        body, by = await desk.read(request, StartLaunch), caller_of(request).name
        return await book.say(name, body.launch_id or new_id(), response, lambda one: one.started(body, by))

    @app.post("/v1/trajectories/{name:path}/launches/{launch_id}/end", status_code=201)
    async def end(name: str, launch_id: str, request: Request, response: Response) -> Json:
        body, by = await desk.read(request, EndLaunch), caller_of(request).name
        return await book.say(name, launch_id, response, lambda one: one.ended(body, by))

    @app.post("/v1/trajectories/{name:path}/launches/{launch_id}/leaks", status_code=201)
    async def leaks(name: str, launch_id: str, request: Request, response: Response) -> Json:
        body, by = await desk.read(request, TellLeaks), caller_of(request).name
        return await book.say(name, launch_id, response, lambda one: one.leaked(body, by))

    @app.post("/v1/evaluations", status_code=201)
    async def evaluated(request: Request) -> Json:
        body, by = await desk.read(request, TellEvaluated), caller_of(request).name
        [event] = await desk.recorder.write(EvalSampled(**body.model_dump(), by=by))
        return body.model_dump() | {"event_id": event.event_id}
