"""Routes about trajectories, and about the launches of their agents.

A trajectory is opened, ended, rewarded, labelled, preferred to another.

A launcher reports that an agent was started for a trajectory, how it ended, what it left behind,
and that agents which were to be evaluated have been; and it asks how far all of them are.

These routes work before and after the trajectory's finish. The trajectory's own key does not open
them: whoever holds it cannot speak for the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import orjson
from cachetools import TTLCache
from fastapi import FastAPI, Request, Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.bounds import run_by_size
from rollbook.edge.guard import Guard, caller_of
from rollbook.ingest.access import check_source, check_trajectory, check_unfinished
from rollbook.ingest.fields import (
    AddLabel,
    AddPreference,
    AssignReward,
    EndLaunch,
    FinishTrajectory,
    Model,
    OpenTrajectory,
    StartLaunch,
    TellEvaluated,
    TellLeaks,
    check_recordable,
    json_object,
    validated,
)
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.run_writer import all_durable
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.trajectories.launches import Launch, rollout_course
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.trajectories.rewards import assigned_reward, description, repeated, turn_of_reply
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import EvalSampled, Json, LabelAdded, PreferenceAdded, Record, TrajectoryOpened
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.ids import new_id


def add_trajectory_routes(
    app: FastAPI, recorder: Recorder, resolver: RequestResolver, guard: Guard, room: BodyBudget
) -> None:
    """Add the routes under /v1/trajectories."""
    context = TrajectoryRouteContext(recorder, resolver, guard, room)
    book = Book(context)
    _add_course(app, context, book)
    _add_reading(app, context)
    _add_remarks(app, context)
    _add_preferences(app, context)
    add_launch_routes(app, context, book)


OPENING = "opening"
"""Label by which a client knows its own request to open a trajectory, and may repeat it."""


def _add_course(app: FastAPI, context: TrajectoryRouteContext, book: Book) -> None:
    """Routes that open a trajectory and finish it."""

    def described(live: LiveTrajectory) -> Json:
        name = live.opened.name
        return {"id": name, "trajectory_id": live.opened.trajectory_id, "api_key": context.guard.key_of(name)}

    @app.post("/v1/trajectories", status_code=201)
    async def open_trajectory(request: Request, response: Response) -> Json:
        body, caller = await context.read(request, OpenTrajectory), caller_of(request)
        check_trajectory(caller, body.id)
        if (known := await _opened_so(context, body)) is not None:
            response.status_code = 200
            return described(known)
        # Refuses a name that is taken before there is anything to wait for.
        live = context.recorder.draft(body, caller.name)
        with contextlib.ExitStack() as places:
            await context.resolver.admit(live.opened.name, body, request, places)
            if (known := await _opened_so(context, body)) is not None:
                response.status_code = 200
                return described(known)
            context.recorder.draft(body)  # refuses a name that was taken meanwhile
            opening = context.recorder.record_opening(live)
            book.opened(live.opened.trajectory_id)
        await all_durable([opening])
        return described(live)

    @app.post("/v1/trajectories/{name:path}/finish")
    async def finish(name: str, request: Request) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        turns = await context.recorder.finish(
            name, await context.read(request, FinishTrajectory), caller.name
        )
        return {"id": name, "status": "finished", "turns": turns}


async def _opened_so(context: TrajectoryRouteContext, body: OpenTrajectory) -> LiveTrajectory | None:
    """The trajectory that this same request opened before: its client did not get the reply, and repeats
    it.

    Only a client that gave its request a label can be told apart from another of the same name.
    """
    live = None if body.id is None else await context.recorder.look_up(body.id)
    word = body.labels.get(OPENING)
    if live is None or live.finished or word is None or live.opened.labels.get(OPENING) != word:
        return None
    if live.opening is not None:
        await all_durable([live.opening])
    return live


def _add_reading(app: FastAPI, context: TrajectoryRouteContext) -> None:
    """The route that gives what the log has of one trajectory, for its judges."""

    @app.get("/v1/trajectories/{name:path}")
    async def read(name: str) -> Response:
        trajectory = await context.recorded(name)
        body = await asyncio.to_thread(lambda: orjson.dumps(description(trajectory)))
        return Response(body, media_type="application/json")


def _add_remarks(app: FastAPI, context: TrajectoryRouteContext) -> None:
    """Routes for rewards and labels, at any time from anybody; from its agent until its end, as itself.

    A reward that is sent again is one reward: 201 for what is new, 200 for a repetition.
    """
    turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @app.post("/v1/trajectories/{name:path}/rewards", status_code=201)
    async def reward(name: str, request: Request, response: Response) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        body = await context.read(request, AssignReward)
        check_source(caller, body.source)
        async with turns.setdefault(name, asyncio.Lock()):
            trajectory = await context.recorded(name)
            record = assigned_reward(trajectory, body, caller.name)
            check_unfinished(caller, name, finished=_is_finished(context.recorder, trajectory))
            if (event_id := repeated(trajectory, record)) is not None:
                response.status_code = 200
            else:
                [event] = await context.recorder.write(record)
                event_id = event.event_id
        return {"id": name, "trajectory_id": record.trajectory_id, "event_id": event_id}

    @app.post("/v1/trajectories/{name:path}/labels", status_code=201)
    async def label(name: str, request: Request) -> Json:
        caller = caller_of(request)
        check_trajectory(caller, name)
        body = await context.read(request, AddLabel)
        check_source(caller, body.source)
        trajectory = await context.recorded(name)
        trajectory_id = trajectory.opened.trajectory_id
        turn_id = turn_of_reply(trajectory, body.turn)
        record = LabelAdded(trajectory_id, turn_id, body.name, body.value, body.source, caller.name)
        check_unfinished(caller, name, finished=_is_finished(context.recorder, trajectory))
        [event] = await context.recorder.write(record)
        return {"id": name, "trajectory_id": trajectory_id, "event_id": event.event_id}


def _add_preferences(app: FastAPI, context: TrajectoryRouteContext) -> None:
    """The route by which judges prefer one trajectory to another, at any time."""

    @app.post("/v1/preferences", status_code=201)
    async def prefer(request: Request) -> Json:
        caller, body = caller_of(request), await context.read(request, AddPreference)
        check_source(caller, body.source)
        chosen, rejected = [
            (await context.recorded(name)).opened.trajectory_id for name in (body.chosen, body.rejected)
        ]
        if chosen == rejected:
            text = f"chosen and rejected are both {body.chosen!r}: a preference is between two trajectories"
            raise RequestError(422, "same_trajectory", text)
        record = PreferenceAdded(chosen, rejected, body.margin, body.source, caller.name)
        [event] = await context.recorder.write(record)
        return {"trajectory_id": chosen, "rejected_trajectory_id": rejected, "event_id": event.event_id}


def _is_finished(recorder: Recorder, trajectory: Trajectory) -> bool:
    """Whether it has ended by now: here, or by another proxy, of which the log says so.

    Asked with nothing to wait for before the write, or a finish could come in between.
    """
    return trajectory.finished is not None or recorder.known(trajectory.opened.name).finished


REMARK_BYTES = 4 << 20
"""Most bytes of what is said of a trajectory."""
_IDS = frozenset({"id", "launch_id"})
"""Fields of a body that are never taken for a secret."""


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRouteContext:
    """What these routes work with."""

    recorder: Recorder
    resolver: RequestResolver
    guard: Guard
    room: BodyBudget

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as the model, without secrets; an id is never taken for one."""
        async with self.room.plain(request, REMARK_BYTES) as raw:
            body = await run_by_size(len(raw), json_object, raw)
            check_recordable(body)
            names = {k: v for k, v in body.items() if k in _IDS}
            fields = await run_by_size(len(raw), self.resolver.recorder.redactor.fields, body)
            parsed = validated(model, fields | names)
            if (
                self.resolver.others is not None
                and isinstance(parsed, OpenTrajectory)
                and parsed.id is not None
            ):
                self.resolver.others.check_name(request, parsed.id, raw)
            return parsed

    async def recorded(self, name: str) -> Trajectory:
        """The trajectory as the log has it, whichever proxy wrote it.

        Raises:
            RequestError: 404, there is none.
        """
        trajectory_id = await self._settled(name)
        trajectory = await asyncio.to_thread(self.recorder.store.trajectory, trajectory_id)
        if trajectory is None:
            raise _dropped(name)
        return trajectory

    async def events(self, name: str) -> tuple[str, list[Event]]:
        """The trajectory's id, and all events of it that are durable.

        Raises:
            RequestError: 404, there is none.
        """
        trajectory_id = await self._settled(name)
        events = await asyncio.to_thread(self.recorder.store.events_about, [trajectory_id])
        if not any(isinstance(event.record, TrajectoryOpened) for event in events):
            raise _dropped(name)
        return trajectory_id, events

    async def _settled(self, name: str) -> str:
        """The trajectory's id, once all that was said of it here is durable or failed."""
        await self.recorder.look_up(name)
        trajectory_id = self.recorder.known(name).opened.trajectory_id
        await self.recorder.settle()
        return trajectory_id


def _dropped(name: str) -> RequestError:
    text = f"trajectory {name!r} is no longer in the store: its events were dropped by retention"
    return RequestError(404, "trajectory_dropped", text)


REMEMBERED, REMEMBERED_S = 4096, 600.0
"""Trajectories whose launches are known without the log, and for how long: retention drops none so soon."""


class Book:
    """Writes reports of launches, each of them once.

    Reports of one trajectory are handled one after another. In between the log is read, unless the
    trajectory was opened here: then every report of its launches that the log can have came here. (A
    launcher speaks to one proxy; of two ends told to two proxies at once the view takes the first.)
    """

    def __init__(self, context: TrajectoryRouteContext) -> None:
        self._desk = context
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._noted: TTLCache[str, tuple[Event, ...]] = TTLCache(REMEMBERED, REMEMBERED_S)
        """Trajectory -> what was said of its launches since its opening."""

    def opened(self, trajectory_id: str) -> None:
        """A trajectory was opened here: nothing is reported of it yet."""
        self._noted[trajectory_id] = ()

    async def say(
        self, name: str, launch_id: str, response: Response, make: Callable[[Launch], Record | str]
    ) -> Json:
        """Write the record that `make` makes of the launch, unless it finds that an event already says so."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            trajectory_id, events = await self._known(name)
            record = make(Launch.among(events, name, trajectory_id, launch_id))
            if isinstance(record, str):
                event_id, response.status_code = record, 200
            else:
                event_id = await self._write(trajectory_id, record)
        return {"id": name, "trajectory_id": trajectory_id, "launch_id": launch_id, "event_id": event_id}

    async def _known(self, name: str) -> tuple[str, Sequence[Event]]:
        """The trajectory's id, and the events that may tell of its launches."""
        live = await self._desk.recorder.look_up(name)
        if live is not None and live.opening is None:  # or it may still turn out not to be there
            trajectory_id = live.opened.trajectory_id
            if (events := self._noted.get(trajectory_id)) is not None:
                return trajectory_id, events
        return await self._desk.events(name)

    async def _write(self, trajectory_id: str, record: Record) -> str:
        """The id of the record's event, once it is durable."""
        before = self._noted.pop(trajectory_id, None)  # where the write fails, only the log knows what it has
        [event] = await self._desk.recorder.write(record)
        if before is not None:
            self._noted[trajectory_id] = (*before, event)
        return event.event_id


def add_launch_routes(app: FastAPI, context: TrajectoryRouteContext, book: Book) -> None:
    """Add the routes under /v1/trajectories/{name}/launches: 201 for what is new, 200 for a repetition."""

    @app.post("/v1/trajectories/{name:path}/launches", status_code=201)
    async def start(name: str, request: Request, response: Response) -> Json:
        body, by = await context.read(request, StartLaunch), caller_of(request).name
        return await book.say(
            name, body.launch_id or new_id(), response, lambda launch: launch.started(body, by)
        )

    @app.post("/v1/trajectories/{name:path}/launches/{launch_id}/end", status_code=201)
    async def end(name: str, launch_id: str, request: Request, response: Response) -> Json:
        body, by = await context.read(request, EndLaunch), caller_of(request).name
        return await book.say(name, launch_id, response, lambda launch: launch.ended(body, by))

    @app.post("/v1/trajectories/{name:path}/launches/{launch_id}/leaks", status_code=201)
    async def leaks(name: str, launch_id: str, request: Request, response: Response) -> Json:
        body, by = await context.read(request, TellLeaks), caller_of(request).name
        return await book.say(name, launch_id, response, lambda launch: launch.leaked(body, by))

    @app.get("/v1/rollouts/{name}")
    async def course(name: str) -> Response:
        recorder = context.recorder
        await recorder.settle()
        progress = await asyncio.to_thread(rollout_course, recorder.store, recorder.run, name)
        return Response(orjson.dumps(progress), media_type="application/json")

    @app.post("/v1/evaluations", status_code=201)
    async def evaluated(request: Request) -> Json:
        body, by = await context.read(request, TellEvaluated), caller_of(request).name
        [event] = await context.recorder.write(EvalSampled(**body.model_dump(), by=by))
        return body.model_dump() | {"event_id": event.event_id}
