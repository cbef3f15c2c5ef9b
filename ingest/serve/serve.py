"""`rollbook serve`: a store, a model and an engine behind one HTTP port.

What `rollbook serve` loads before it records anything, and what each worker makes of it.

What settings cannot mean together, or on this system.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from rollbook import store
from rollbook.edge.connections import Connections, bounded_http, connections_for, raise_descriptors
from rollbook.edge.listening import listening_on
from rollbook.edge.memory import give_back
from rollbook.edge.web_pages import is_loopback
from rollbook.engines.engine import Engine
from rollbook.engines.hub import hub_reference, name_at_hub
from rollbook.engines.startup_check import check_engines
from rollbook.engines.weights.identify import Identity
from rollbook.ingest.cluster.bus import Bus, Inboxes
from rollbook.ingest.cluster.messages import Wire, token_of
from rollbook.ingest.cluster.peers import Peers
from rollbook.ingest.cluster.setup import Cluster
from rollbook.ingest.cluster.shard_leases import ShardLeases, seat_claimed
from rollbook.ingest.cluster.shared_connections import shared_http, take_connections
from rollbook.ingest.cluster.siblings import Siblings
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.family import Family
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.serve.engines import MakeEngine, make_engine, model_of, upstream_of
from rollbook.ingest.serve.proxy import Seals, build_app, identity_of, sealer_beside
from rollbook.ingest.serve.viewer import ViewerBeside, viewer_beside
from rollbook.ingest.serve.workers import Workers, in_child
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.bridge import Bridges, TreePolicy
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.ingest.trajectories.place import ALONE, FIRST, Place
from rollbook.ingest.upstream.paths import Upstream
from rollbook.ingest.upstream.proxy import SERVER_OPTIONS, build_upstream_app
from rollbook.store import Store
from rollbook.store.errors import ConfigError, LaneLockedError
from rollbook.store.events import Json, RunOpened
from rollbook.store.log.writer import LaneWriter
from rollbook.store.secret import ELSEWHERE, SECRET, store_secret
from rollbook.store.settings import read_settings


@dataclass(frozen=True, slots=True)
class Started:
    """What a proxy announces once it listens.

    Attributes:
        url: where it listens.
        adopted: lane whose process is gone -> how many of its open trajectories this one goes on with.
        truncated_bytes: of a write that never finished, cut off the lane.
        exposed: hosts beyond this one reach it, and no key is asked for.
        upstream: where requests are passed on to; None where an engine answers them here.
        reply_format: how replies are read; None for an upstream.
        refused: why no turn is ever extended, or None.
        notes: what was seen of the engine at its first look.
    """

    run: str
    store: Path
    lane: str
    url: str
    adopted: Mapping[str, int]
    truncated_bytes: int
    exposed: bool
    upstream: str | None = None
    reply_format: str | None = None
    refused: str | None = None
    notes: Sequence[str] = ()


Announce = Callable[[Started], None]
BACKLOG = 4096
ADOPTED_S = 20.0
"""So long another proxy may take to adopt what this one's lane left open."""
LEAVE_S = 5.0
"""So long a proxy that ends may take to give its seats away before it closes its port."""
END_S = 10
"""After so many seconds a proxy that ends cuts off whatever is still being answered."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a start found in the log: see `Started`."""

    lane: str
    adopted: Mapping[str, int]
    truncated_bytes: int


def recorded_by(recorder: Recorder) -> Recorded:
    """What this recorder found."""
    return Recorded(recorder.lane, recorder.adopted, recorder.writer.recovered.truncated_bytes)


def serve(settings: ServeSettings, secrets: ProxySecrets, announce: Announce) -> None:
    """Serve until interrupted.

    Args:
        announce: called once, before the first request is taken.

    Raises:
        RollbookError: something named in the settings cannot be used.
    """
    check_settings(settings)
    if settings.workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be in the workers
    proxy = prepared(settings, secrets)
    listener = listening_on(settings.host, settings.port)
    with viewer_beside(settings.store, settings.model) as viewer:
        if settings.proxies:
            _serve_as_one_of(proxy, listener, viewer, announce)
            return
        _check_one_process(settings)
        with claimed(settings) as log:
            if settings.workers > 1:
                _serve_together(proxy, listener, viewer, log, announce)
                return
            recorder = _recorder(log, settings)
            info = proxy.looked_at(recorder)
            announce(_started(proxy, listener, log.path, recorded_by(recorder), info))
            _run(settings, log.path, proxy.app(recorder), viewer, listener, proxy.headers, recorder=recorder)


def _check_one_process(settings: ServeSettings) -> None:
    """Check that a store of several hosts is recorded into by processes that have begun by themselves.

    Raises:
        ConfigError: workers are forked, which what carries the store does not outlive.
    """
    path = Path(settings.store)
    if settings.workers > 1 and path.exists() and read_settings(path).medium.url is not None:
        raise ConfigError(
            f"workers = {settings.workers}: the store is one of several hosts ([medium] in its store.toml): "
            "start so many proxies instead, each as one of `proxies`, on this host or on several"
        )


@contextlib.contextmanager
def claimed(settings: ServeSettings) -> Iterator[Store]:
    """The store, claimed to record the run: a client's name means one trajectory in it."""
    log = store.open(settings.store, create=True)
    with log.claim(f"recording run {settings.run}", "name another run with --run"):
        yield log


def _recorder(
    log: Store,
    settings: ServeSettings,
    place: Place = ALONE,
    budget: int | None = None,
    patience_s: float = 0.0,
) -> Recorder:
    """The recorder of one process.

    Args:
        patience_s: how long to wait for its lane, of which another proxy may just be adopting what is open.
    """
    memory = settings.share.memory_bytes if budget is None else budget
    until = time.monotonic() + patience_s
    while True:
        try:
            return Recorder(log, place.lane(settings.lane), settings.run, memory, place=place)
        except LaneLockedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


# One of several proxies -----------------------------------------------------------------------------


def _serve_as_one_of(
    proxy: Prepared, listener: socket.socket, viewer: ViewerBeside, announce: Announce
) -> None:
    """Serve as one of several proxies of the run: see `ingest.cluster.peers`."""
    settings = proxy.settings
    log = store.open(settings.store, create=True)
    _check_secret(log)
    place = Place(settings.proxy, len(settings.proxies))
    lanes = place.lanes(settings.lane)
    wire = Wire(settings.proxies, lanes, settings.proxy, token_of(log.path, settings.run))
    with seat_claimed(log, settings.run, wire) as claims:
        recorder = _recorder(log, settings, place, patience_s=ADOPTED_S)
        info = proxy.looked_at(recorder)
        announce(_started(proxy, listener, log.path, recorded_by(recorder), info))
        peers = Peers(ShardLeases(wire, recorder, claims), settings.naming)
        peers.keeps_headers = bool(proxy.headers)
        own = log.carrier is not None  # each host seals its own lanes; of one folder, one proxy does all
        if settings.seal and not own:
            peers.duties.append(Seals(log.path))
        app = proxy.app(recorder, peers)
        with sealer_beside(log.path) if settings.seal and own else contextlib.nullcontext():
            _run(settings, log.path, app, viewer, listener, proxy.headers, peers=peers, recorder=recorder)


def _check_secret(log: Store) -> None:
    """Check that all hosts have one secret, from which keys and the proxies' token are made.

    Raises:
        ConfigError: this one has another.
    """
    digest = hashlib.sha256(store_secret(log.path, "hosts")).hexdigest()
    if log.carrier is not None and not log.carrier.agree("secret", digest):
        raise ConfigError(
            f"{log.path / SECRET} is another secret than that of the store's other hosts, so their proxies "
            f"would not know this one: copy it from one of them, or let {ELSEWHERE} name a file of the same "
            "content"
        )


# Several workers ----------------------------------------------------------------------------------


def _serve_together(
    proxy: Prepared, listener: socket.socket, viewer: ViewerBeside, log: Store, announce: Announce
) -> None:
    """Serve with several workers: see `ingest.serve.workers`."""
    settings = proxy.settings
    opened = in_child(lambda: _open_together(proxy, log.path))
    listener.listen(BACKLOG)  # who comes before the workers waits
    announce(_started(proxy, listener, log.path, *opened))
    inboxes = Inboxes.made(settings.workers)

    def work(number: int, ready: Callable[[], None]) -> None:
        place = Place(number, settings.workers)
        mine = store.open(settings.store)
        siblings = Siblings(place, Bus(place, inboxes), place.lanes(settings.lane), settings.naming)
        app = proxy.app(_recorder(mine, settings, place), siblings)
        _run(settings, mine.path, app, viewer, listener, proxy.headers, siblings, ready)

    gc.collect()
    gc.freeze()  # what is loaded is the same for all workers: a collection would copy it for each
    try:
        Workers(settings.workers, work).run()
    finally:
        gc.unfreeze()


def _open_together(proxy: Prepared, path: Path) -> tuple[Recorded, Json]:
    """Before there are workers: let each trajectory be its owner's, check the engines, and open the run."""
    settings, adopted, truncated = proxy.settings, Counter[str](), 0
    log = store.open(path)
    for number in reversed(range(settings.workers)):
        with contextlib.closing(
            _recorder(log, settings, Place(number, settings.workers), budget=0)
        ) as recorder:
            adopted.update(recorder.adopted)
            truncated += recorder.writer.recovered.truncated_bytes
            info = proxy.looked_at(recorder) if number == FIRST else {}
    lanes = Place(FIRST, settings.workers).lanes(settings.lane)
    return Recorded(", ".join(lanes), {k: n for k, n in adopted.items() if n}, truncated), info


def _run(
    settings: ServeSettings,
    path: Path,
    app: FastAPI,
    viewer: ViewerBeside,
    listener: socket.socket,
    headers: Mapping[str, bool],
    siblings: Siblings | None = None,
    ready: Callable[[], None] = lambda: None,
    peers: Peers | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Run the application until a signal ends it; `ready` is called once connections are taken.

    Raises:
        FencedError: another host has taken over what the recorder held.
    """
    config = _server_config(settings, app, siblings, headers)
    viewer.add(app)
    stops = (app.state.stop, viewer.stop)
    writer = None if recorder is None else recorder.writer
    server = _Server(config, siblings, ready, peers, stops, writer)
    for endless in (app.state.streams, *([] if peers is None else [peers.seats])):
        endless.stopping = lambda: server.should_exit  # neither a followed tail nor a watch ends by itself
    # What is loaded by now is never freed. Without freezing it the first full collection would visit all
    # of it, and delay every reply by 90 to 350 ms.
    gc.collect()
    give_back()  # memory that reading the log took
    gc.freeze()
    # uvicorn raises a signal again once it has shut down; the contexts around it must end orderly too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seals = settings.seal and peers is None and (siblings is None or siblings.place.is_first)
    try:
        with sealer_beside(path) if seals else contextlib.nullcontext():
            server.run(sockets=[listener])
        if writer is not None and writer.fenced is not None:
            raise writer.fenced
    finally:
        gc.unfreeze()  # what is frozen is not collected at the end either: DuckDB's module says so at length


def _server_config(
    settings: ServeSettings, app: FastAPI, siblings: Siblings | None, headers: Mapping[str, bool]
) -> uvicorn.Config:
    each = 2 if settings.engine in ("upstream", "sglang") else 1
    wanted = settings.share.max_connections
    places = Connections(connections_for(raise_descriptors(), each, wanted), app.state.refused)
    http = bounded_http(places) if siblings is None else shared_http(places, siblings)
    return uvicorn.Config(
        app,
        http=http,  # type: ignore[arg-type]  # makes protocols
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,  # the command's own handler: a line a record
        timeout_keep_alive=75,
        timeout_graceful_shutdown=END_S,
        backlog=BACKLOG,
        **forwarding(settings.forwarded_from),
        **headers,  # type: ignore[arg-type]
    )


class _Server(uvicorn.Server):
    """uvicorn's, which goes on with connections of other workers, and says when it is ready."""

    def __init__(
        self,
        config: uvicorn.Config,
        siblings: Siblings | None,
        ready: Callable[[], None],
        peers: Peers | None,
        stops: Sequence[Callable[[], None]],
        writer: LaneWriter | None,
    ) -> None:
        super().__init__(config)
        self._siblings, self._ready, self._peers, self._stops = siblings, ready, peers, stops
        self._writer = writer

    async def on_tick(self, counter: int) -> bool:
        """Whether to end, asked ten times a second: also once another host has taken over."""
        return await super().on_tick(counter) or (
            self._writer is not None and self._writer.fenced is not None
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        if self._siblings is not None:
            take_connections(self, self._siblings)
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, once other proxies know that this one ends.

        Who sent a request on to one that had just closed its port could not tell whether it had been heard.
        What waits, for weights, for its turn or for room, is told to come again, or all would wait for it.
        """
        for stop in self._stops:
            stop()
        if self._peers is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._peers.seats.left.wait(), LEAVE_S)
        await super().shutdown(sockets)


def forwarding(addresses: Sequence[str]) -> dict[str, Any]:
    """For uvicorn: the client is the connection's peer, unless that is one of these proxies and names the
    client."""
    return {"proxy_headers": bool(addresses), "forwarded_allow_ips": list(addresses)}


def _started(proxy: Prepared, listener: socket.socket, path: Path, recorded: Recorded, info: Json) -> Started:
    settings = proxy.settings
    loopback = is_loopback(settings.host) or settings.host == "localhost"
    return Started(
        run=settings.run,
        store=path,
        lane=recorded.lane,
        url=f"http://{settings.host}:{listener.getsockname()[1]}",
        adopted=recorded.adopted,
        truncated_bytes=recorded.truncated_bytes,
        exposed=not loopback and not proxy.secrets.keys.configured,
        **info,
    )


class Prepared(Protocol):
    """A proxy whose parts are loaded."""

    settings: ServeSettings
    secrets: ProxySecrets
    headers: Mapping[str, bool]
    """For uvicorn: which headers it adds to replies."""

    def looked_at(self, recorder: Recorder) -> Json:
        """Check the engines, record that the run is opened, and say what `Started` says of them.

        Raises:
            RollbookError: an engine cannot be used.
        """

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The application; with others, if it is not the only process that records the run."""


def prepared(settings: ServeSettings, secrets: ProxySecrets) -> Prepared:
    """Load what the settings name.

    Raises:
        RollbookError: something cannot be used.
    """
    if settings.engine == "upstream":
        return ForUpstream(settings, secrets, upstream_of(settings, secrets))
    model = model_of(settings)
    tokenizer = load_chat_tokenizer(model)
    family = choose_family(settings.reply_format, model, tokenizer.template_source)
    make = make_engine(settings, secrets, tokenizer)
    tree = TreePolicy(settings.reasoning, settings.history, settings.unfinished)
    return ForTokens(settings, secrets, model, family, make, Bridges.tested(tokenizer, tree))


def recorded_settings(settings: ServeSettings, secrets: ProxySecrets) -> Json:
    """What `run.opened` says of a proxy: under the names that logs have had from the first; of keys their
    names and roles."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    def of(*names: str) -> Json:
        return {name: plain(getattr(settings, name)) for name in names}

    return {
        **of("store", "model", "engine", "script", "host", "port", "run", "lane", "workers", "proxies"),
        "number": settings.proxy,
        **of("policy", "device", "threads", "seal"),
        "engine_urls": [address.url for address in settings.engine_url],
        "engine_key": bool(secrets.engine_key),
        "engine_admin_key": bool(secrets.engine_admin_key),
        **of("engine_ask", "images", "routed_experts", "reply_format"),
        "tree": of("reasoning", "history", "unfinished"),
        **of("hold_s", "forwarded_from"),
        "pass_paths": settings.pass_path,
        "proxy": {
            "keys": secrets.keys.roles(),
            "keys_file": plain(settings.keys),
            "hosts": sorted(secrets.own.names),
            "origins": sorted(secrets.own.origins),
            "trajectory_headers": settings.naming[1:],
            **of("on_store_failure", "max_body_bytes", "max_bodies_bytes", "body_timeout_s", "max_running"),
            **of("max_connections", "max_consumers", "max_reply_bytes", "memory_bytes", "admission"),
            "abandoned_s": settings.abandon_s,
            "image_hosts": settings.image_host,
        },
    }


@dataclass(slots=True, eq=False)
class ForUpstream:
    """Passes requests on and records what passed."""

    settings: ServeSettings
    secrets: ProxySecrets
    upstream: Upstream
    headers: Mapping[str, bool] = field(default_factory=lambda: SERVER_OPTIONS)

    def looked_at(self, recorder: Recorder) -> Json:
        """Record that the run is opened."""
        recorder.append(RunOpened("serve", recorded_settings(self.settings, self.secrets))).result()
        return {"upstream": self.upstream.url}

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The record-only proxy."""
        return build_upstream_app(recorder, self.upstream, self.settings.share, self.secrets, others)


@dataclass(slots=True, eq=False)
class ForTokens:
    """Renders and tokenizes here, and has an engine answer."""

    settings: ServeSettings
    secrets: ProxySecrets
    model: Path
    family: Family
    make: MakeEngine
    bridges: Bridges
    headers: Mapping[str, bool] = field(default_factory=dict)
    _made: tuple[Recorder, Engine, Identity] | None = None

    def looked_at(self, recorder: Recorder) -> Json:
        """Check the engines, and record that the run is opened."""
        engine, identity = self._engine(recorder)
        notes = check_engines(engine, identity, self.model)
        config = recorded_settings(self.settings, self.secrets)
        config |= {"reply_format": self.family.name, "refused": self.bridges.refused} | hub_reference(
            self.model
        )
        digests = (self.bridges.tokenizer.tokenizer_digest, self.bridges.tokenizer.template_digest)
        recorder.append(RunOpened("serve", config, str(self.model), *digests)).result()
        return {"reply_format": self.family.name, "refused": self.bridges.refused, "notes": notes}

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The proxy."""
        engine, identity = self._engine(recorder)
        turn_runner = TurnRunner(recorder, engine, self.bridges, self.family, self.settings.hold_s)
        name = (name_at_hub(self.model) or self.model.resolve().name).split("/")[-1].split("@")[0]
        return build_app(turn_runner, self.settings.share, self.secrets, name, identity, others)

    def _engine(self, recorder: Recorder) -> tuple[Engine, Identity]:
        """The engine, and who identifies its weights; of one recorder the same."""
        if self._made is None or self._made[0] is not recorder:
            identity = identity_of(recorder, self.settings.policy, self.model)
            self._made = recorder, self.make(identity), identity
        return self._made[1:]


def check_settings(settings: ServeSettings) -> None:
    """See that a proxy can run with these settings.

    Raises:
        ConfigError: it cannot.
    """
    Redactor(settings.redact)
    if settings.workers > 1:
        _check_workers(settings)
    if settings.proxies or settings.proxy:
        _check_proxies(settings)
    for address in settings.forwarded_from:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            text = f"--forwarded-from {address!r}: {error}: give an address or a network, such as 10.0.0.0/8"
            raise ConfigError(text) from error


def _check_workers(settings: ServeSettings) -> None:
    """See that there can be several workers.

    Raises:
        ConfigError: there cannot.
    """
    if settings.engine == "embedded":
        text = f"--workers {settings.workers}: the embedded engine holds its weights in one process: "
        raise ConfigError(text + "use --workers 1, or serve the model with SGLang and --engine sglang")
    if sys.platform != "linux":
        text = f"--workers {settings.workers} needs Linux, which hands connections from process to process: "
        raise ConfigError(text + "use --workers 1")


def _check_proxies(settings: ServeSettings) -> None:
    """See that this can be one of several proxies.

    Raises:
        ConfigError: it cannot.
    """
    count = len(settings.proxies)
    if count < 2 or len(set(settings.proxies)) < count:
        raise ConfigError(f"proxies {list(settings.proxies)}: name two or more, each once")
    if settings.proxy >= count:
        raise ConfigError(f"--proxy {settings.proxy}: there are {count} proxies, 0 to {count - 1}")
    if settings.engine == "embedded":
        text = "proxies: the embedded engine holds its weights in one process: serve the model with SGLang"
        raise ConfigError(f"{text} and --engine sglang, or record with one proxy")
    if settings.workers > 1:
        raise ConfigError(f"--workers {settings.workers}: one of several proxies is one process; name more")
