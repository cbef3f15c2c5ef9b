"""What `rollbook serve` runs with, made of its settings and secrets, and the engine that it names."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from rollbook.edge.keys import keys_of
from rollbook.edge.web_pages import own
from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import Engine
from rollbook.engines.fleet import Fleet
from rollbook.engines.hub import model_folder
from rollbook.engines.model_files import require_folder
from rollbook.engines.scripted import ScriptedEngine, load_script
from rollbook.engines.sglang.client import SglangEngine, routing_of
from rollbook.engines.sglang.protocol import Routing
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import OWN
from rollbook.ingest.options import ProxyOptions
from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.serve.settings import ServeSettings
from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import conversation_digest
from rollbook.ingest.upstream.paths import paths_of
from rollbook.ingest.upstream.proxy import Upstream
from rollbook.store.errors import ConfigError, EngineError
from rollbook.store.events import Json

KEY_VARIABLE, ADMIN_KEY_VARIABLE = "ROLLBOOK_ENGINE_KEY", "ROLLBOOK_ENGINE_ADMIN_KEY"
ENGINES = ("embedded", "sglang", "upstream", "scripted")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `rollbook serve` runs with. See `TreePolicy` and `ProxyOptions` for what is not said here.

    Attributes:
        reply_format: a family of `ingest.replies`, or auto: by the chat template.
        engine_ask: fields that an upstream is asked for beyond what agents send.
        engine_urls: one for an upstream, one or several for SGLang.
        engine_admin_key: of SGLang's control routes, where they have one of their own.
        images: the engine's model takes them.
        routed_experts: have the engine return, and record, which experts each token went to.
        workers: processes that take requests, each with a lane of its own.
        proxies: addresses of all proxies of the run, where there are several; `number`: which one this is.
        hold_s: how long a request waits while weights are being replaced.
        forwarded_from: addresses and networks of proxies in front, whose headers name the client.
        pass_paths: for an upstream with a key: more methods and paths that pass.
    """

    store: Path
    model: Path | None = None
    engine: str = "embedded"
    script: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    run: str = "default"
    lane: str = "serve"
    workers: int = 1
    proxies: tuple[str, ...] = ()
    number: int = 0
    policy: str = "actor"
    device: str = "cpu"
    threads: int | None = None
    seal: bool = True
    engine_urls: tuple[EngineAddress, ...] = ()
    engine_key: str | None = field(default=None, repr=False)
    engine_admin_key: str | None = field(default=None, repr=False)
    engine_ask: Json | None = None
    images: bool = False
    routed_experts: bool = False
    reply_format: str = "auto"
    tree: TreePolicy = field(default_factory=TreePolicy)
    hold_s: float = 110.0
    forwarded_from: tuple[str, ...] = ()
    pass_paths: tuple[str, ...] = ()
    proxy: ProxyOptions = field(default_factory=ProxyOptions)

    def __post_init__(self) -> None:
        if self.workers > 1:
            _check_workers(self)
        if self.proxies or self.number:
            _check_proxies(self)
        for address in self.forwarded_from:
            try:
                ipaddress.ip_network(address)
            except ValueError as error:
                text = (
                    f"--forwarded-from {address!r}: {error}: give an address or a network, such as 10.0.0.0/8"
                )
                raise ConfigError(text) from error

    def as_json(self) -> dict[str, object]:
        """For `run.opened`; keys are left out."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        shown |= {
            "engine_key": bool(self.engine_key),
            "engine_admin_key": bool(self.engine_admin_key),
            "proxy": self.proxy.as_json(),
            "tree": asdict(self.tree),
        }
        shown["engine_urls"] = [address.url for address in self.engine_urls]
        return {k: str(v) if isinstance(v, Path) else v for k, v in shown.items()}


def _check_workers(options: ServeOptions) -> None:
    """See that there can be several workers.

    Raises:
        ConfigError: there cannot.
    """
    if options.engine == "embedded":
        text = f"--workers {options.workers}: the embedded engine holds its weights in one process: "
        raise ConfigError(text + "use --workers 1, or serve the model with SGLang and --engine sglang")
    if sys.platform != "linux":
        text = f"--workers {options.workers} needs Linux, which hands connections from process to process: "
        raise ConfigError(text + "use --workers 1")


def _check_proxies(options: ServeOptions) -> None:
    """See that this can be one of several proxies.

    Raises:
        ConfigError: it cannot.
    """
    count = len(options.proxies)
    if count < 2 or len(set(options.proxies)) < count:
        raise ConfigError(f"proxies {list(options.proxies)}: name two or more, each once")
    if options.number >= count:
        raise ConfigError(f"--proxy {options.number}: there are {count} proxies, 0 to {count - 1}")
    if options.engine == "embedded":
        text = "proxies: the embedded engine holds its weights in one process: serve the model with SGLang"
        raise ConfigError(f"{text} and --engine sglang, or record with one proxy")
    if options.workers > 1:
        raise ConfigError(f"--workers {options.workers}: one of several proxies is one process; name more")


@dataclass(frozen=True, slots=True)
class Secrets:
    """What opens engines and the proxy, as options or the environment gave it.

    Attributes:
        api_keys: operators' keys.
    """

    engine_key: str | None = field(default=None, repr=False)
    engine_admin_key: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)


def options_of(
    settings: ServeSettings, secrets: Secrets, environment: MutableMapping[str, str], machine: str
) -> ServeOptions:
    """The options that settings and secrets make. Secrets are taken out of the environment.

    Args:
        machine: this machine's name.

    Raises:
        ConfigError: one of them cannot be used.
    """
    return ServeOptions(
        **{name: getattr(settings, name) for name in _SAME},
        engine_urls=settings.engine_url,
        number=settings.proxy,
        engine_key=engine_key_of(secrets.engine_key, environment),
        engine_admin_key=engine_key_of(secrets.engine_admin_key, environment, admin=True),
        tree=TreePolicy(settings.reasoning, settings.history, settings.unfinished),
        pass_paths=settings.pass_path,
        proxy=_proxy_options(settings, secrets, environment, machine),
    )


_SAME = (
    *("store", "model", "engine", "script", "host", "port", "run", "lane", "workers", "proxies"),
    *("policy", "device", "threads", "seal", "engine_ask", "images", "routed_experts", "reply_format"),
    *("hold_s", "forwarded_from"),
)
"""Settings that are options of the same name."""


def _proxy_options(
    settings: ServeSettings, secrets: Secrets, environment: MutableMapping[str, str], machine: str
) -> ProxyOptions:
    names = [urlsplit(url).netloc for url in settings.proxies[settings.proxy :][:1]]
    return ProxyOptions(
        keys=keys_of(secrets.api_keys, settings.keys, environment),
        own=own(settings.host, machine, [*settings.allow_host, *names], settings.allow_origin),
        trajectory_headers=tuple(dict.fromkeys(name.lower() for name in settings.trajectory_header)),
        on_store_failure=settings.on_store_failure,
        max_body_bytes=int(settings.max_body_mb * 2**20),
        max_bodies_bytes=int(settings.max_bodies_mb * 2**20),
        body_timeout_s=settings.body_timeout_s,
        max_reply_bytes=int(settings.max_reply_mb * 2**20),
        max_running=settings.max_running,
        max_connections=settings.max_connections,
        max_consumers=settings.max_consumers,
        memory_bytes=int(settings.memory_mb * 2**20),
        abandoned_s=settings.abandon_s,
        admission=settings.admission,
        image_hosts=settings.image_host,
        redactor=Redactor(settings.redact),
    )


MakeEngine = Callable[[Identity], Engine]
"""Makes the engine, given the object that identifies weights."""


def make_engine(options: ServeOptions, tokenizer: ChatTokenizer) -> MakeEngine:
    """The factory of the engine that the options name; slow or failing work is done before it returns.

    Raises:
        EngineError, ModelError, ConfigError: it cannot be made; the message says why.
    """
    match options.engine:
        case "scripted":
            if options.script is None:
                raise ConfigError("--engine scripted needs --script file.py:function or file.jsonl")
            family = choose_family(options.reply_format, model_of(options), tokenizer.template_source)
            script = load_script(options.script, conversation_digest)
            scripted = ScriptedEngine(ReplyWriter(tokenizer, family), script)
            return lambda identity: scripted
        case "sglang":
            return _sglang(options)
        case "embedded":
            return _embedded(options)
        case "upstream":
            raise ConfigError("--engine upstream passes requests on and has no engine here")
    raise ConfigError(f"--engine {options.engine!r}: use one of {', '.join(ENGINES)}")


def _sglang(options: ServeOptions) -> MakeEngine:
    if not options.engine_urls:
        raise ConfigError("--engine sglang needs --engine-url, such as http://127.0.0.1:30000")
    if len({address.url for address in options.engine_urls}) < len(options.engine_urls):
        raise ConfigError("--engine-url names a server twice: name each once")
    routing = _routing(options) if options.routed_experts else None

    def made(identity: Identity) -> Engine:
        engines = {
            address.url: SglangEngine(
                address,
                identity,
                policy=options.policy,
                takes_images=options.images,
                key=options.engine_key,
                admin_key=options.engine_admin_key,
                routed_experts=routing,
            )
            for address in options.engine_urls
        }
        return Fleet(engines, options.hold_s)

    return made


def _routing(options: ServeOptions) -> Routing:
    """What the mixture of experts is made of.

    Raises:
        ConfigError: the model is none.
    """
    model = model_of(options)
    found = routing_of(model)
    if found is None:
        raise ConfigError(f"--routed-experts: {model} is no mixture of experts")
    return found


def _embedded(options: ServeOptions) -> MakeEngine:
    try:
        from rollbook.engines.embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise EngineError(
            f"the embedded engine needs torch and transformers ({error}): pip install 'rollbook[engine]'"
        ) from error
    engine = EmbeddedEngine(
        model_of(options), policy=options.policy, device=options.device, threads=options.threads
    )
    fleet = Fleet({OWN: engine})

    def made(identity: Identity) -> Engine:
        engine.weights.begin_with(identity.log.own)
        return fleet

    return made


def model_of(options: ServeOptions) -> Path:
    """The model's directory, which all but an upstream need: its tokenizer and chat template make the ids.

    Raises:
        ConfigError: none is named.
        ModelError: it is not there.
    """
    if options.model is None:
        raise ConfigError(
            f"--engine {options.engine} needs --model DIR: its tokenizer and template make the ids"
        )
    folder = model_folder(options.model, weights=options.engine == "embedded")
    require_folder(folder, "--model")
    return folder


def engine_key_of(
    given: str | None, environment: MutableMapping[str, str], *, admin: bool = False
) -> str | None:
    """An engine's key, if there is one; our children's environment does not hold it.

    Args:
        admin: that of its control routes, which may have one of their own.

    Raises:
        ConfigError: it is empty: then requests would pass with their agents' own keys, wherever they go.
    """
    option, variable = ("--engine-admin-key", ADMIN_KEY_VARIABLE) if admin else ("--engine-key", KEY_VARIABLE)
    empty = given is None and environment.get(variable, "unset").strip() == ""
    if empty or (given is not None and not given.strip()):
        raise ConfigError(f"{option} or {variable} is set and empty: unset it, or give it the key")
    environment.pop(variable, None)
    return given


def upstream_of(options: ServeOptions) -> Upstream:
    """Where `--engine upstream` passes requests to.

    Raises:
        ConfigError: it is not said, or with a login and a key, or a path that is to pass is none.
    """
    if len(options.engine_urls) != 1:
        raise ConfigError("--engine upstream needs one --engine-url, such as https://api.openai.com/v1")
    [address] = options.engine_urls
    address.headers(options.engine_key)  # refuses a login together with a key
    paths_of(options.pass_paths)
    upstream = Upstream(address, options.engine_key, options.engine_ask, options.pass_paths)
    if options.pass_paths and not upstream.secrets:
        raise ConfigError(
            "--pass-path adds to what passes with --engine-key: without a key everything passes"
        )
    return upstream
