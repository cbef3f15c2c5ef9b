"""The recording proxy: agents' requests in, events and an engine's answers out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request, Response

from rollbook.ingest.admission.gate import AdmissionGate
from rollbook.ingest.admission.outstanding import KINDS
from rollbook.ingest.engines.engine import Engine
from rollbook.ingest.engines.fleet import Fleet
from rollbook.ingest.engines.identify import Identity
from rollbook.ingest.engines.weights.log import WeightLog
from rollbook.ingest.http.access import sees_details
from rollbook.ingest.http.body_room import BodyRoom, PacedBodies
from rollbook.ingest.http.error_replies import add_error_replies, error_form
from rollbook.ingest.http.events_api import add_event_routes
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.guard import Guard, add_guards, caller_of
from rollbook.ingest.http.key_watch import KeyWatch
from rollbook.ingest.http.keys import Keys
from rollbook.ingest.http.metrics import Metrics
from rollbook.ingest.http.model_routes import ModelRoutes
from rollbook.ingest.http.options import ProxyOptions
from rollbook.ingest.http.trajectory_routes import add_trajectory_routes
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnTaker
from rollbook.ingest.recording.sweep import sweep
from rollbook.ingest.serve.follow import Follower
from rollbook.ingest.turns.images import ImageLinks
from rollbook.store.events import (
    EngineControlled,
    Event,
    Json,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.log.tail import Filter


def identity_of(recorder: Recorder, policy: str, model: Path | None = None) -> Identity:
    """What binds the weights that engines hold to versions, in the recorder's log.

    Args:
        model: the directory that the run starts from, or a checkpoint, to compare engines with.
    """
    run = recorder.known_run
    log = WeightLog(recorder.store, recorder.run, policy, run.weights, run.cut)
    return Identity(log, recorder.write, model)


def build_app(
    taker: TurnTaker,
    options: ProxyOptions | None = None,
    model_name: str = "rollbook",
    identity: Identity | None = None,
) -> FastAPI:
    """The proxy as an ASGI application; it starts and stops the engine, and closes the recorder."""
    recorder, engine = taker.recorder, taker.engine
    options = (options or ProxyOptions()).recorded_by(recorder)
    gate = AdmissionGate(recorder.known_run.outstanding, engine.policy_version, taker.hold_s)
    door = FrontDoor(recorder, options, gate if options.admission else None)
    metrics, room = Metrics(), BodyRoom(options)
    _tell(recorder, engine, gate, metrics)
    identity = identity or identity_of(recorder, getattr(engine, "policy", "actor"))
    deaf: list[str] = []
    """Why the log is not followed: then nobody hears of a sync, or of room for trajectories."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start(partial(identity.activated, engine.name))
        follower = _follow(recorder, engine, gate, deaf)
        sweeping = asyncio.create_task(sweep(recorder, options.abandoned_s))
        following = asyncio.create_task(options.keys.follow())
        yield
        sweeping.cancel()
        following.cancel()
        await follower.stop()
        await engine.close()
        await taker.drained()
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    add_error_replies(app, error_form, metrics.refused)
    app.state.refused = metrics.refused
    routes = ModelRoutes(recorder, taker, door, room, metrics, ImageLinks(options.image_hosts), model_name)
    guard = Guard.of(options.keys, recorder.run, recorder.store.path)
    add_trajectory_routes(app, recorder, door, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, options.max_consumers)
    routes.add(app)
    _add_health(app, taker, deaf, options.keys)
    _add_metrics(app, taker, metrics, gate)
    _add_control(app, recorder, engine, options)
    add_guards(app, guard, options.own, metrics.failed)
    return app


def _controlled(recorder: Recorder, engine: Engine) -> Callable[..., Awaitable[None]]:
    """What writes down who did what to the engine in this process."""

    async def controlled(request: Request, action: str, asked: Json, error: str | None) -> None:
        by = caller_of(request).name
        await recorder.write(EngineControlled(engine.name, action, asked, error, by))

    return controlled


def _add_control(app: FastAPI, recorder: Recorder, engine: Engine, options: ProxyOptions) -> None:
    control = engine.control()
    if control is not None:
        app.add_middleware(PacedBodies, prefix="/engine", silence_s=options.body_timeout_s)
        app.state.controlled = _controlled(recorder, engine)
        app.include_router(control, prefix="/engine")


def _tell(recorder: Recorder, engine: Engine, gate: AdmissionGate, metrics: Metrics) -> None:
    """Let everybody hear of what the recorder writes, and of what it could not."""
    recorder.on_events = KeyWatch(metrics.registry, gate.take).take
    recorder.on_unopened, recorder.on_lost = gate.unopened, metrics.lost_events.inc
    if isinstance(engine, Fleet):
        recorder.on_finished = engine.forget


def _follow(recorder: Recorder, engine: Engine, gate: AdmissionGate, deaf: list[str]) -> Follower:
    """Hear what the trainer and other proxies write, from where the recorder has read.

    Args:
        deaf: why nothing is heard, while that is so.
    """
    syncs = engine.heard if isinstance(engine, Fleet) else lambda record: None
    if isinstance(engine, Fleet):
        engine.remember(recorder.known_run.syncs)

    def heard(events: list[Event]) -> None:
        for event in events:
            if isinstance(event.record, SyncStarted | SyncFinished | SyncFailed):
                syncs(event.record)
        gate.take(events)  # after the syncs: what is served decides how many may begin

    def failed(trouble: str | None) -> None:
        deaf[:] = [] if trouble is None else [trouble]

    kinds = KINDS | {SyncStarted.KIND, SyncFinished.KIND, SyncFailed.KIND}
    wanted = Filter(kinds, run=recorder.run, skip_lanes=frozenset([recorder.lane]))
    follower = Follower(recorder.store, recorder.known_run.cut, wanted, heard, failed)
    follower.start()
    return follower


def _add_health(app: FastAPI, taker: TurnTaker, deaf: Sequence[str], keys: Keys) -> None:
    recorder, engine = taker.recorder, taker.engine

    @app.get("/healthz")
    async def healthz(request: Request, response: Response) -> Json:
        writer = recorder.writer
        failure = writer.failure or writer.waiting or engine.failure() or next(iter(deaf), None)
        response.status_code = 503 if failure else 200
        if not sees_details(caller_of(request)):
            return {"status": "failing" if failure else "ok"}
        told: Json = {
            "status": failure or "ok",
            "run": recorder.run,
            "lane": recorder.lane,
            "engine": engine.name,
            "policy_version": engine.policy_version(),
            "engines": engine.states() if isinstance(engine, Fleet) else [],
            **keys.trouble(),
        }
        return recorder.redactor.fields(told)


def _add_metrics(app: FastAPI, taker: TurnTaker, metrics: Metrics, gate: AdmissionGate) -> None:
    @app.get("/metrics")
    async def page() -> Response:
        metrics.held.set(gate.waiting)
        return metrics.page(taker.recorder, taker.engine.policy_version())
