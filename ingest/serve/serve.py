"""`rollbook serve`: a store, a model and an engine behind one HTTP port."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from rollbook import store
from rollbook.ingest.engines.startup_check import check_engines
from rollbook.ingest.http.connections import Connections, bounded_http, connections_for, raise_descriptors
from rollbook.ingest.http.memory import give_back
from rollbook.ingest.http.web_pages import is_loopback
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.serve.options import ServeOptions, make_engine, model_of, upstream_of
from rollbook.ingest.serve.proxy import build_app, identity_of
from rollbook.ingest.serve.sealer_child import sealer_beside
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.ingest.upstream.proxy import SERVER_OPTIONS, build_upstream_app
from rollbook.store.errors import ConfigError
from rollbook.store.events import RunOpened


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


def serve(options: ServeOptions, announce: Announce) -> None:
    """Serve until interrupted.

    Args:
        announce: called once, before the first request is taken.

    Raises:
        RollbookError: something named in the options cannot be used.
    """
    if options.engine == "upstream":
        _serve_upstream(options, announce)
    else:
        _serve_tokens(options, announce)


def _serve_upstream(options: ServeOptions, announce: Announce) -> None:
    """Pass requests on and record what passed."""
    upstream = upstream_of(options)
    listener = listening_on(options.host, options.port)
    with _recorder(options) as recorder:
        recorder.append(RunOpened("serve", options.as_json())).result()
        announce(_started(options, listener, recorder, upstream=upstream.url))
        app = build_upstream_app(recorder, upstream, options.proxy, options.policy)
        _run(options, recorder, app, listener, SERVER_OPTIONS)


def _serve_tokens(options: ServeOptions, announce: Announce) -> None:
    """Render and tokenize here, and have an engine answer."""
    model = model_of(options)
    tokenizer = load_chat_tokenizer(model)
    family = choose_family(options.reply_format, model, tokenizer.template_source)
    made = make_engine(options, tokenizer)
    listener = listening_on(options.host, options.port)
    with _recorder(options) as recorder:
        identity = identity_of(recorder, options.policy, model)
        engine = made(identity)
        notes = check_engines(engine, identity, model)
        bridges = Bridges.tested(tokenizer, options.tree)
        turn_runner = TurnRunner(recorder, engine, bridges, family, options.hold_s)
        config = options.as_json() | {"reply_format": family.name, "refused": bridges.refused}
        digests = (tokenizer.tokenizer_digest, tokenizer.template_digest)
        recorder.append(RunOpened("serve", config, str(model), *digests)).result()
        said = {"reply_format": family.name, "refused": bridges.refused, "notes": notes}
        announce(_started(options, listener, recorder, **said))
        app = build_app(turn_runner, options.proxy, model.resolve().name, identity)
        _run(options, recorder, app, listener)


@contextlib.contextmanager
def _recorder(options: ServeOptions) -> Iterator[Recorder]:
    log = store.open(options.store, create=True)
    # One proxy a run: a client's name means one trajectory in it.
    with log.claim(f"recording run {options.run}", "name another run with --run"):
        yield Recorder(log, options.lane, options.run, options.proxy.memory_bytes)


def _run(
    options: ServeOptions,
    recorder: Recorder,
    app: FastAPI,
    listener: socket.socket,
    headers: Mapping[str, bool] | None = None,
) -> None:
    each = 2 if options.engine in ("upstream", "sglang") else 1
    most = connections_for(raise_descriptors(), each, options.proxy.max_connections)
    config = uvicorn.Config(
        app,
        http=bounded_http(Connections(most, app.state.refused)),  # type: ignore[arg-type]  # makes protocols
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,  # the command's own handler: a line a record
        timeout_keep_alive=75,
        backlog=4096,
        **forwarding(options.forwarded_from),
        **(headers or {}),  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    app.state.streams.stopping = lambda: server.should_exit  # a followed tail never ends by itself
    # What is loaded by now is never freed. Without freezing it the first full collection would visit all
    # of it, and delay every reply by 90 to 350 ms.
    gc.collect()
    give_back()  # memory that reading the log took
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # conversations are long-lived trees without cycles: look less often
    # uvicorn raises a signal again once it has shut down; the contexts around it must end orderly too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with sealer_beside(recorder.store.path) if options.seal else contextlib.nullcontext():
            server.run(sockets=[listener])
    finally:
        gc.unfreeze()  # what is frozen is not collected at the end either: DuckDB's module says so at length


def forwarding(addresses: Sequence[str]) -> dict[str, Any]:
    """For uvicorn: the client is the connection's peer, unless that is one of these proxies and names the
    client."""
    return {"proxy_headers": bool(addresses), "forwarded_allow_ips": list(addresses)}


def listening_on(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one.

    Raises:
        ConfigError: it cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    return listener


def _started(options: ServeOptions, listener: socket.socket, recorder: Recorder, **said: Any) -> Started:
    loopback = is_loopback(options.host) or options.host == "localhost"
    return Started(
        run=options.run,
        store=recorder.store.path,
        lane=options.lane,
        url=f"http://{options.host}:{listener.getsockname()[1]}",
        adopted=recorder.adopted,
        truncated_bytes=recorder.writer.recovered.truncated_bytes,
        exposed=not loopback and not options.proxy.keys.configured,
        **said,
    )
