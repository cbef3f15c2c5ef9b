"""Routes for who starts agents: that one was started for a trajectory, how it ended, what it left behind;
that those which were to be evaluated have been; and how far they all are.

They work before and after the trajectory's finish. The trajectory's own key does not open them: what it is
given to cannot speak for who started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import orjson
from cachetools import TTLCache
from fastapi import FastAPI, Request, Response

from rollbook.ingest.http.desk import Desk
from rollbook.ingest.http.guard import caller_of
from rollbook.ingest.requests.launch_fields import EndLaunch, StartLaunch, TellEvaluated, TellLeaks
from rollbook.ingest.trajectories.launches import Launch
from rollbook.ingest.trajectories.rollout_course import rollout_course
from rollbook.store import Event
from rollbook.store.events import EvalSampled, Json, Record
from rollbook.store.ids import new_id

REMEMBERED, REMEMBERED_S = 4096, 600.0
"""Trajectories whose launches are known without the log, and for how long: retention drops none so soon."""


class Book:
    """Writes what is said of launches, each thing once.

    What is said of one trajectory at a time is said one after the other: in between the log is read, unless
    it was opened here, so that all that the log can have of its launches was said here. (A launcher speaks to
    one proxy; of two ends told to two proxies at the same time the view takes the first.)
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._said: TTLCache[str, tuple[Event, ...]] = TTLCache(REMEMBERED, REMEMBERED_S)
        """Trajectory -> what was said of its launches since its opening."""

    def opened(self, trajectory_id: str) -> None:
        """A trajectory was opened here: nothing is said of it yet."""
        self._said[trajectory_id] = ()

    async def say(
        self, name: str, launch_id: str, response: Response, made: Callable[[Launch], Record | str]
    ) -> Json:
        """Write the record that `made` makes of the launch, unless it finds that an event says so already."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            trajectory_id, events = await self._known(name)
            said = made(Launch.among(events, name, trajectory_id, launch_id))
            if isinstance(said, str):
                event_id, response.status_code = said, 200
            else:
                event_id = await self._write(trajectory_id, said)
        return {"id": name, "trajectory_id": trajectory_id, "launch_id": launch_id, "event_id": event_id}

    async def _known(self, name: str) -> tuple[str, Sequence[Event]]:
        """The trajectory's id, and what was said of its launches."""
        live = await self._desk.recorder.look_up(name)
        if live is not None and live.opening is None:  # or it may still turn out not to be there
            trajectory_id = live.opened.trajectory_id
            if (said := self._said.get(trajectory_id)) is not None:
                return trajectory_id, said
        return await self._desk.events(name)

    async def _write(self, trajectory_id: str, record: Record) -> str:
        """The id of the record's event, once it is durable."""
        before = self._said.pop(trajectory_id, None)  # where the write fails, only the log knows what it has
        [event] = await self._desk.recorder.write(record)
        if before is not None:
            self._said[trajectory_id] = (*before, event)
        return event.event_id


def add_launch_routes(app: FastAPI, desk: Desk, book: Book) -> None:
    """Add the routes under /v1/trajectories/{name}/launches: 201 for what is new, 200 for a repetition."""

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

    @app.get("/v1/rollouts/{name}")
    async def course(name: str) -> Response:
        recorder = desk.recorder
        await recorder.settle()
        said = await asyncio.to_thread(rollout_course, recorder.store, recorder.run, name)
        return Response(orjson.dumps(said), media_type="application/json")

    @app.post("/v1/evaluations", status_code=201)
    async def evaluated(request: Request) -> Json:
        body, by = await desk.read(request, TellEvaluated), caller_of(request).name
        [event] = await desk.recorder.write(EvalSampled(**body.model_dump(), by=by))
        return body.model_dump() | {"event_id": event.event_id}
