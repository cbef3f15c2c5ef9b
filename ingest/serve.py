"""`rollbook serve`: a store, a model and an engine behind one HTTP port."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import uvicorn
from rich.console import Console

from rollbook import store
from rollbook.ingest.engines.engine import Engine
from rollbook.ingest.engines.scripted import ScriptedEngine, load_script
from rollbook.ingest.proxy import build_app
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.sealer_child import sealer_beside
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.store.errors import ConfigError, EngineError
from rollbook.store.events import RunOpened

ENGINES = ("embedded", "scripted")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `rollbook serve` was told."""

    store: Path
    model: Path
    engine: str = "embedded"
    script: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    run: str = "default"
    lane: str = "serve"
    policy: str = "actor"
    device: str = "cpu"
    threads: int | None = None
    seal: bool = True

    def as_json(self) -> dict[str, object]:
        """For `run.opened`."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}


def make_engine(options: ServeOptions, tokenizer: ChatTokenizer) -> Engine:
    """The engine the options name.

    Raises:
        EngineError, ModelError, ConfigError: it cannot be made; the message says why.
    """
    if options.engine == "scripted":
        if options.script is None:
            raise ConfigError("--engine scripted needs --script file.py:function or file.jsonl")
        return ScriptedEngine(tokenizer, load_script(options.script))
    if options.engine != "embedded":
        raise ConfigError(f"--engine {options.engine!r}: use one of {', '.join(ENGINES)}")
    try:
        from rollbook.ingest.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise EngineError(
            f"the embedded engine needs torch and transformers ({error}): pip install 'rollbook[engine]'"
        ) from error
    return EmbeddedEngine(
        options.model, policy=options.policy, device=options.device, threads=options.threads
    )


def serve(options: ServeOptions) -> None:
    """Serve until interrupted.

    Raises:
        RollbookError: something named in the options cannot be used.
    """
    tokenizer = load_chat_tokenizer(options.model)
    engine = make_engine(options, tokenizer)
    listener = _listen(options.host, options.port)
    log = store.open(options.store, create=True)
    # One proxy a run: a client's name means one trajectory in it.
    with log.claim(f"recording run {options.run}", "name another run with --run"):
        _serve(options, log, tokenizer, engine, listener)


def _serve(
    options: ServeOptions,
    log: store.Store,
    tokenizer: ChatTokenizer,
    engine: Engine,
    listener: socket.socket,
) -> None:
    recorder = Recorder(log, options.lane, options.run, tokenizer)
    recorder.note(
        RunOpened(
            "serve",
            options.as_json(),
            str(options.model),
            tokenizer.tokenizer_digest,
            tokenizer.template_digest,
        )
    )
    _announce(options, listener.getsockname()[1], recorder)
    app = build_app(recorder, engine)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75)
    server = uvicorn.Server(config)
    app.state.streams.stopping = lambda: server.should_exit  # a tail that is followed has no end of its own
    # What is imported and loaded by now stays. Without this the first full collection goes through all of
    # it, and every reply waits for 90 to 350 ms.
    gc.collect()
    gc.freeze()
    with sealer_beside(recorder.store.path) if options.seal else contextlib.nullcontext():
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    return listener


def _announce(options: ServeOptions, port: int, recorder: Recorder) -> None:
    console = Console(stderr=True)
    base = f"http://{options.host}:{port}"
    console.print(f"recording run [bold]{options.run}[/] into {recorder.store.path} (lane {options.lane})")
    console.print(f"point an agent here: base_url = [bold]{base}/t/ANY-ID/v1[/]")
    for lane, count in recorder.adopted.items():
        console.print(f"adopted {count} open trajectories of lane {lane}, whose process is gone")
    truncated = recorder.writer.recovered.truncated_bytes
    if truncated:
        console.print(f"recovered: cut off {truncated} bytes of a write that never finished")
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = options.host == "localhost"
    if not loopback:
        console.print("[yellow]listening beyond this host, and there is no authentication[/]")
