"""`rollbook serve`: a store, a model and an engine behind one HTTP port."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import socket
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import uvicorn
from rich.console import Console

from rollbook import store
from rollbook.ingest.engines.engine import Engine
from rollbook.ingest.engines.scripted import ScriptedEngine, load_script
from rollbook.ingest.engines.sglang import SglangEngine
from rollbook.ingest.options import ProxyOptions
from rollbook.ingest.proxy import build_app
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.replies.detect import detect_family, family_named
from rollbook.ingest.sealer_child import sealer_beside
from rollbook.ingest.tokens.bridge import Bridges, TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.ingest.turns import TurnTaker
from rollbook.store.errors import ConfigError, EngineError
from rollbook.store.events import RunOpened

ENGINES = ("embedded", "sglang", "scripted")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `rollbook serve` was told. See `TreePolicy` and `ProxyOptions` for what is not said here.

    Attributes:
        reply_format: a family of `ingest.replies`, or auto: by the chat template.
        images: the engine's model takes them.
        hold_s: how long a request waits while weights are being replaced.
    """

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
    engine_url: str | None = None
    engine_key: str | None = None
    images: bool = False
    reply_format: str = "auto"
    tree: TreePolicy = field(default_factory=TreePolicy)
    hold_s: float = 110.0
    proxy: ProxyOptions = field(default_factory=ProxyOptions)

    def as_json(self) -> dict[str, object]:
        """For `run.opened`; keys are left out."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        shown |= {
            "engine_key": bool(self.engine_key),
            "proxy": self.proxy.as_json(),
            "tree": asdict(self.tree),
        }
        return {k: str(v) if isinstance(v, Path) else v for k, v in shown.items()}


def make_engine(options: ServeOptions, tokenizer: ChatTokenizer) -> Engine:
    """The engine the options name.

    Raises:
        EngineError, ModelError, ConfigError: it cannot be made; the message says why.
    """
    match options.engine:
        case "scripted":
            if options.script is None:
                raise ConfigError("--engine scripted needs --script file.py:function or file.jsonl")
            return ScriptedEngine(tokenizer, load_script(options.script))
        case "sglang":
            if options.engine_url is None:
                raise ConfigError("--engine sglang needs --engine-url, such as http://127.0.0.1:30000")
            return SglangEngine(
                options.engine_url,
                policy=options.policy,
                takes_images=options.images,
                key=options.engine_key,
            )
        case "embedded":
            return _embedded(options)
    raise ConfigError(f"--engine {options.engine!r}: use one of {', '.join(ENGINES)}")


def _embedded(options: ServeOptions) -> Engine:
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
    auto = options.reply_format == "auto"
    family = family_named(detect_family(tokenizer.template_source) if auto else options.reply_format)
    engine = make_engine(options, tokenizer)
    listener = _listen(options.host, options.port)
    log = store.open(options.store, create=True)
    # One proxy a run: a client's name means one trajectory in it.
    with log.claim(f"recording run {options.run}", "name another run with --run"):
        recorder = Recorder(log, options.lane, options.run)
        bridges = Bridges.tested(tokenizer, options.tree)
        taker = TurnTaker(recorder, engine, bridges, family, options.hold_s)
        _serve(options, taker, listener)


def _serve(options: ServeOptions, taker: TurnTaker, listener: socket.socket) -> None:
    recorder, tokenizer = taker.recorder, taker.bridges.tokenizer
    config = options.as_json() | {"reply_format": taker.family.name, "refused": taker.bridges.refused}
    digests = (tokenizer.tokenizer_digest, tokenizer.template_digest)
    recorder.note(RunOpened("serve", config, str(options.model), *digests))
    _announce(options, listener.getsockname()[1], taker)
    app = build_app(taker, options.proxy, options.model.resolve().name)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75, backlog=4096)
    )
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


def _announce(options: ServeOptions, port: int, taker: TurnTaker) -> None:
    console = Console(stderr=True)
    recorder = taker.recorder
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
    console.print(f"replies are read as {taker.family.name}")
    if taker.bridges.refused:
        console.print(f"[yellow]turns are never extended, each is a root: {taker.bridges.refused}[/]")
    if not loopback and not options.proxy.api_keys:
        console.print("[yellow]listening beyond this host, and everybody may come in: set --api-key[/]")
