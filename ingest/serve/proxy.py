"""The recording proxy: agents' requests in, events and an engine's answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI, Request

from rollbook.edge.bodies import BodyBudget, PacedBodies
from rollbook.edge.guard import caller_of
from rollbook.edge.keys import Keys
from rollbook.engines.engine import Engine
from rollbook.engines.fleet import Fleet
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import WeightLog
from rollbook.ingest.access import run_guard
from rollbook.ingest.admission.gate import AdmissionGate
from rollbook.ingest.admission.outstanding import KINDS
from rollbook.ingest.cluster.admitting import GateServer, RemoteGate
from rollbook.ingest.cluster.aggregate import OK, WorkerAggregate, add_aggregate, only_for, whose
from rollbook.ingest.cluster.peers import Peers
from rollbook.ingest.cluster.setup import Cluster, add_all_guards, health, join, meeting, stops
from rollbook.ingest.cluster.siblings import Siblings, answer_errors
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.routes.calls import ModelRoutes
from rollbook.ingest.routes.events import add_event_routes
from rollbook.ingest.routes.key_watch import KeyWatch, housekeeping
from rollbook.ingest.routes.lookups import LookupRoutes
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.routes.trajectories import add_trajectory_routes
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.serve.follow import GATHER_S, Follower
from rollbook.ingest.serve.leader_duties import SIBLINGS_GATHER_S, GateDuty
from rollbook.ingest.settings import ServeSettings
from rollbook.store.events import EngineControlled, Event, Json, SyncFailed, SyncFinished, SyncStarted
from rollbook.store.log.tail import Filter

SYNCS = frozenset({SyncStarted.KIND, SyncFinished.KIND, SyncFailed.KIND})


def identity_of(recorder: Recorder, policy: str, model: Path | None = None) -> Identity:
    """The object that binds engines' weights to versions, in the recorder's log.

    Args:
        model: the directory that the run starts from, or a checkpoint, to compare engines with.
    """
    run = recorder.known_run
    log = WeightLog(recorder.store, recorder.run, policy, run.weights, run.cut)
    return Identity(log, recorder.write, model)


def build_app(
    turn_runner: TurnRunner,
    settings: ServeSettings,
    secrets: ProxySecrets,
    model_name: str = "rollbook",
    identity: Identity | None = None,
    others: Cluster | None = None,
) -> FastAPI:
    """The proxy as an ASGI application, beside other workers or other proxies of the run perhaps; it starts
    and stops the engine, and closes the recorder."""
    recorder, engine = turn_runner.recorder, turn_runner.engine
    recorder.redactor = recorder.redactor.with_patterns(settings.redact)
    gate = _gate(turn_runner, others)
    resolver = RequestResolver(recorder, settings, gate if settings.admission else None, others)
    metrics, room = Metrics(), BodyBudget(**settings.body_limits)
    _connect(recorder, engine, gate, metrics)
    identity = identity or identity_of(recorder, getattr(engine, "policy", "actor"))
    follow_error: list[str] = []  # while the log cannot be followed: syncs and freed room go unnoticed

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start(partial(identity.activated, engine.name))
        followers = _follow(recorder, engine, gate, others, follow_error)
        _keep_gate(others, turn_runner, gate, followers[1], follow_error)
        async with housekeeping(recorder, settings.abandon_s, secrets.keys), meeting(others):
            yield
        for follower in followers:
            await follower.stop()
        await engine.close()
        await turn_runner.drained()
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    answer_errors(app, metrics)
    join(app, others, recorder.redactor.text, _knows(recorder), room, metrics)
    guard = run_guard(secrets.keys, recorder.run, recorder.store.path)
    add_trajectory_routes(app, recorder, resolver, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, settings.max_consumers)
    ModelRoutes(turn_runner, resolver, room, metrics).add(app)
    LookupRoutes(turn_runner, resolver, room, model_name).add(app)
    details = partial(_details, turn_runner, follow_error, secrets.keys, others)
    _add_health(app, turn_runner, details, metrics, gate, others)
    _add_control(app, recorder, engine, settings.body_timeout_s)
    add_all_guards(app, others, secrets.own, guard, metrics)
    stops(app, others, gate.stop, turn_runner.stop, room.stop)
    return app


def _gate(turn_runner: TurnRunner, others: Cluster | None) -> AdmissionGate | RemoteGate:
    """What admits trajectories: one of several workers or proxies does for all."""
    recorder, engine, hold_s = turn_runner.recorder, turn_runner.engine, turn_runner.hold_s
    if others is None or (isinstance(others, Siblings) and others.place.is_first):
        return AdmissionGate(recorder.known_run.outstanding, engine.policy_version, hold_s)
    return RemoteGate(others.bus, recorder.trajectories.get, hold_s)


def _keep_gate(
    others: Cluster | None,
    turn_runner: TurnRunner,
    gate: AdmissionGate | RemoteGate,
    follower: Follower,
    follow_error: list[str],
) -> None:
    """Keep the gate for all workers or proxies, if that is this one's to do, or comes to be."""
    if isinstance(others, Siblings) and isinstance(gate, AdmissionGate):
        GateServer(gate, others.bus, follower.caught_up)
    if isinstance(others, Peers):
        others.duties.append(GateDuty(others.bus, turn_runner, partial(_keep, follow_error)))


def _controlled(recorder: Recorder, engine: Engine) -> Callable[..., Awaitable[None]]:
    """The callback that records who controlled the engine in this process, and how."""

    async def controlled(request: Request, action: str, asked: Json, error: str | None) -> None:
        by = caller_of(request).name
        await recorder.write(EngineControlled(engine.name, action, asked, error, by))

    return controlled


def _add_control(app: FastAPI, recorder: Recorder, engine: Engine, silence_s: float) -> None:
    control = engine.control()
    if control is not None:
        app.add_middleware(PacedBodies, prefix="/engine", silence_s=silence_s)
        app.state.controlled = _controlled(recorder, engine)
        app.include_router(control, prefix="/engine", dependencies=[Depends(only_for(whose(recorder)))])


def _connect(recorder: Recorder, engine: Engine, gate: AdmissionGate | RemoteGate, metrics: Metrics) -> None:
    """Connect those who act on what the recorder writes, and on what it could not write."""
    if isinstance(gate, AdmissionGate):
        recorder.on_events = KeyWatch(metrics.registry, gate.take).take
        recorder.on_unopened = gate.unopened
    else:
        recorder.on_events = KeyWatch(metrics.registry).take
    recorder.on_lost = metrics.lost_events.inc
    if isinstance(engine, Fleet):
        recorder.on_finished = engine.forget


def _follow(
    recorder: Recorder,
    engine: Engine,
    gate: AdmissionGate | RemoteGate,
    others: Cluster | None,
    follow_error: list[str],
) -> tuple[Follower, Follower]:
    """Follow what the trainer and other proxies write, from where the recorder has read.

    Args:
        follow_error: is kept up to date: why the log cannot be followed, while that is so.

    Returns:
        Who follows syncs, and who tells the gate: the same one where there is one worker.
    """
    if isinstance(engine, Fleet):
        trained = recorder.known_run.outstanding.training is not None
        engine.remember(recorder.known_run.syncs, trained=trained)

    def on_events(events: list[Event]) -> None:
        for event in events:
            if isinstance(engine, Fleet) and isinstance(
                event.record, SyncStarted | SyncFinished | SyncFailed
            ):
                engine.on_sync(event.record)
        if isinstance(gate, AdmissionGate):
            gate.take(events)  # after the syncs: which version is served decides how many may begin

    on_error = partial(_keep, follow_error)

    def follower(kinds: frozenset[str], lanes: Iterable[str], gather_s: float) -> Follower:
        wanted = Filter(kinds, run=recorder.run, skip_lanes=frozenset(lanes))
        made = Follower(recorder.store, recorder.known_run.cut, wanted, on_events, on_error, gather_s)
        made.start()
        return made

    if others is None:
        one = follower(KINDS | SYNCS, [recorder.lane], GATHER_S)
        return one, one
    # The others write much, and no syncs.
    syncs = follower(SYNCS, others.lanes, GATHER_S)
    if not isinstance(gate, AdmissionGate):
        return syncs, syncs
    return syncs, follower(KINDS, [recorder.lane], SIBLINGS_GATHER_S)


def _keep(follow_error: list[str], error: str | None) -> None:
    """Keep why the log cannot be followed, while that is so."""
    follow_error[:] = [] if error is None else [error]


def _knows(recorder: Recorder) -> Callable[[str], bool]:
    """Whether a reply, by its id, is of a trajectory that is open here."""

    def knows(reply_id: str) -> bool:
        turns = (api.ids.turn_of(reply_id) for api in APIS.values() if api.ids is not None)
        return any(turn_id is not None and recorder.of_turn(turn_id) is not None for turn_id in turns)

    return knows


def _details(
    turn_runner: TurnRunner, follow_error: Sequence[str], keys: Keys, others: Cluster | None
) -> Json:
    """What is known of this process's health."""
    recorder, engine = turn_runner.recorder, turn_runner.engine
    writer = recorder.writer
    failure = writer.failure or writer.waiting or engine.failure() or next(iter(follow_error), None)
    return {
        "status": failure or OK,
        "run": recorder.run,
        "lane": recorder.lane,
        "engine": engine.name,
        "policy_version": engine.policy_version(),
        "engines": engine.states() if isinstance(engine, Fleet) else [],
        **health(others),
        **keys.trouble(),
    }


def _add_health(
    app: FastAPI,
    turn_runner: TurnRunner,
    details: Callable[[], Json],
    metrics: Metrics,
    gate: AdmissionGate | RemoteGate,
    others: Cluster | None,
) -> None:
    siblings = others if isinstance(others, Siblings) else None

    def version() -> int | None:
        metrics.held.set(gate.waiting)
        return turn_runner.engine.policy_version()

    recorder = turn_runner.recorder
    add_aggregate(app, WorkerAggregate(siblings, metrics, recorder, details, version), recorder)
