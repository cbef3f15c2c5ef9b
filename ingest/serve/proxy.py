"""The recording proxy: agents' requests in, events and an engine's answers out.

The duties of the proxy that holds the first seat: it keeps the gate, and seals.

The sealer is a child process that ends with the proxy, however that ends.

So reading, compressing and writing segments takes no time from the event loop, and has a low priority.

Follows what other processes write into the store: the proxy learns of the trainer's syncs from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI, Request

import rollbook
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
from rollbook.ingest.cluster.peers import PeerBus, Peers
from rollbook.ingest.cluster.setup import Cluster, add_all_guards, health, join, meeting, stops
from rollbook.ingest.cluster.siblings import Siblings, answer_errors
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.routes.calls import ModelRoutes
from rollbook.ingest.routes.events import add_event_routes
from rollbook.ingest.routes.key_watch import KeyWatch, housekeeping
from rollbook.ingest.routes.lookups import LookupRoutes
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.routes.trajectories import add_trajectory_routes
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.settings import ServeSettings
from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import RollbookError
from rollbook.store.events import EngineControlled, Event, Json, SyncFailed, SyncFinished, SyncStarted
from rollbook.store.log.tail import Filter, Tail

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
    ModelRoutes(turn_runner, resolver, room, metrics).add(app)
    join(app, others, recorder.redactor.text, _knows(recorder), room, metrics)
    guard = run_guard(secrets.keys, recorder.run, recorder.store.path)
    add_trajectory_routes(app, recorder, resolver, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, settings.max_consumers)
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
        both = follower(KINDS | SYNCS, [recorder.lane], GATHER_S)
        return both, both
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


SIBLINGS_GATHER_S = 0.2
"""Pause after each read of what others write: admission counts what begins before it reads of it."""


@dataclass(slots=True, eq=False)
class GateDuty:
    """Keeps the gate of admission for all proxies: by all that is in the log, this one's part too."""

    bus: PeerBus
    turn_runner: TurnRunner
    on_error: Callable[[str | None], None]
    _kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def begin(self, runs: RunReader) -> None:
        """Admit from now on, beginning with what there is in the run."""
        recorder, engine = self.turn_runner.recorder, self.turn_runner.engine
        gate = AdmissionGate(runs.outstanding, engine.policy_version, self.turn_runner.hold_s)
        wanted = Filter(KINDS, run=recorder.run)
        follower = Follower(recorder.store, runs.cut, wanted, gate.take, self.on_error, SIBLINGS_GATHER_S)
        follower.start()
        self._kept.push_async_callback(follower.stop)
        self._kept.callback(GateServer(gate, self.bus, follower.caught_up).close)

    async def end(self) -> None:
        """Another one does."""
        await self._kept.aclose()


@dataclass(slots=True, eq=False)
class Seals:
    """Has a sealer beside this proxy."""

    store: Path
    _child: SealerChild | None = None

    async def begin(self, _: RunReader) -> None:
        """Start it."""
        self._child = SealerChild(self.store)

    async def end(self) -> None:
        """End it."""
        if self._child is not None:
            await asyncio.to_thread(self._child.close)


logger = logging.getLogger(__name__)

RESTARTS = 5
PAUSE_S = 1.0
"""Seconds before the first restart; each later one waits that much longer."""
END_S = 4.0
"""How long an ending sealer may take for the unit it is writing. Killed later, it is written anew."""


class SealerChild:
    """Starts the sealer, and again when it dies, up to `RESTARTS` times."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._ending = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, name="sealer-child", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sealer, by force if it takes too long."""
        self._ending.set()
        self._end()
        self._thread.join(END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        # The same package that this process runs, wherever it was imported from.
        path = [str(Path(rollbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "rollbook", "store", "seal", "--watch", "--json"]
        return subprocess.Popen(
            [*command, "--store", str(self._store), "--parent", str(os.getpid())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # a terminal's interrupt goes to the proxy, which ends this process
        )

    def _watch(self) -> None:
        for restart in range(RESTARTS + 1):
            status = self.process.wait()
            # 0: it was asked to end.
            if status == 0 or self._ending.is_set():
                return
            if restart == RESTARTS:
                break
            logger.warning(
                "the sealer ended (exit code %s); starting it again, %s of %s", status, restart + 1, RESTARTS
            )
            if self._ending.wait(PAUSE_S * (restart + 1)):
                return
            self.process = self._start()
            if self._ending.is_set():
                self._end()
                return
        logger.warning(
            "the sealer ended %s times and is left alone: recording goes on, nothing is sealed; see what "
            "`rollbook store seal --store %s` says",
            RESTARTS + 1,
            self._store,
        )

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def sealer_beside(store: Path) -> Iterator[SealerChild]:
    """A sealer of the store while the context lasts."""
    child = SealerChild(store)
    try:
        yield child
    finally:
        child.close()


WAIT_S = 0.2
"""Longest wait for more events before the follower checks whether it is to stop."""
GATHER_S = 0.02
"""Pause after each read, so that a busy lane is read in batches, at a fraction of the CPU."""
RETRY_S = 1.0
"""Pause after a failed read."""


class Follower:
    """Hands over events of other lanes, on the event loop, as they become durable.

    Args:
        start: the cut that was read before.
        wanted: which events; leave out those of the proxy's own lane.
        on_events: called with the events.
        gather_s: pause after each read.
        on_error: called with the reason why the log cannot be followed, and with None once it can again.
            A damaged log ends the following; an error of the system, such as too few descriptors, is retried.
    """

    def __init__(
        self,
        store: Store,
        start: Cut,
        wanted: Filter,
        on_events: Callable[[list[Event]], None],
        on_error: Callable[[str | None], None],
        gather_s: float = GATHER_S,
    ) -> None:
        self._store, self._wanted = store, wanted
        self._start = {lane: count for lane, count in start.items() if lane not in wanted.skip_lanes}
        self._handed = self._start
        """The cut up to which events were handed over."""
        self._on_events, self._on_error = on_events, on_error
        self._gather_s = gather_s
        self._stopping = threading.Event()
        self._troubled = False
        self._thread = threading.Thread(target=self._run, name="rollbook-follow", daemon=True)

    def start(self) -> None:
        """Begin; call it on the event loop that the callbacks are to run on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop, and wait until the thread has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def caught_up(self) -> None:
        """Return once everything was handed over that is durable by now."""
        head = await asyncio.to_thread(self._store.head)
        wanted = {lane: count for lane, count in head.items() if lane not in self._wanted.skip_lanes}
        while any(self._handed.get(lane, 0) < count for lane, count in wanted.items()):
            await asyncio.sleep(GATHER_S)
        await asyncio.sleep(0)  # what was handed over last is called before this goes on

    def _run(self) -> None:
        tail: Tail | None = None
        while not self._stopping.is_set():
            try:
                tail = tail or self._store.tail(self._start, self._wanted)
                self._follow(tail)
            except RollbookError as error:
                self._call(self._on_error, f"the log cannot be followed: {error}")
                return
            except OSError as error:
                self._troubled = True
                self._call(self._on_error, f"the log cannot be followed now: {error}")
                self._stopping.wait(RETRY_S)

    def _follow(self, tail: Tail) -> None:
        """Hand over events until `stop`."""
        while not self._stopping.is_set():
            events = tail.poll()
            if self._troubled:
                self._troubled = False
                self._call(self._on_error, None)
            if events:
                self._call(self._on_events, events)
            self._handed = tail.cut()
            if events:
                self._stopping.wait(self._gather_s)
            else:
                tail.wait(WAIT_S)

    def _call(self, callback: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, argument)
