"""The engine, or the upstream, that settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollbook.engines.engine import Engine
from rollbook.engines.fleet import Fleet
from rollbook.engines.hub import model_folder
from rollbook.engines.model_files import require_folder
from rollbook.engines.scripted import ScriptedEngine, load_script
from rollbook.engines.sglang.client import SglangEngine, routing_of
from rollbook.engines.sglang.protocol import Routing
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import OWN
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import conversation_digest
from rollbook.ingest.upstream.paths import paths_of
from rollbook.ingest.upstream.proxy import Upstream
from rollbook.store.errors import ConfigError, EngineError

ENGINES = ("embedded", "sglang", "upstream", "scripted")

MakeEngine = Callable[[Identity], Engine]
"""Makes the engine, given the object that identifies weights."""


def make_engine(settings: ServeSettings, secrets: ProxySecrets, tokenizer: ChatTokenizer) -> MakeEngine:
    """The factory of the engine that the settings name; slow or failing work is done before it returns.

    Raises:
        EngineError, ModelError, ConfigError: it cannot be made; the message says why.
    """
    match settings.engine:
        case "scripted":
            if settings.script is None:
                raise ConfigError("--engine scripted needs --script file.py:function or file.jsonl")
            family = choose_family(settings.reply_format, model_of(settings), tokenizer.template_source)
            script = load_script(settings.script, conversation_digest)
            scripted = ScriptedEngine(ReplyWriter(tokenizer, family), script)
            return lambda identity: scripted
        case "sglang":
            return _sglang(settings, secrets)
        case "embedded":
            return _embedded(settings)
        case "upstream":
            raise ConfigError("--engine upstream passes requests on and has no engine here")
    raise ConfigError(f"--engine {settings.engine!r}: use one of {', '.join(ENGINES)}")


def _sglang(settings: ServeSettings, secrets: ProxySecrets) -> MakeEngine:
    if not settings.engine_url:
        raise ConfigError("--engine sglang needs --engine-url, such as http://127.0.0.1:30000")
    if len({address.url for address in settings.engine_url}) < len(settings.engine_url):
        raise ConfigError("--engine-url names a server twice: name each once")
    routing = _routing(settings) if settings.routed_experts else None

    def made(identity: Identity) -> Engine:
        engines = {
            address.url: SglangEngine(
                address,
                identity,
                policy=settings.policy,
                takes_images=settings.images,
                key=secrets.engine_key,
                admin_key=secrets.engine_admin_key,
                routed_experts=routing,
            )
            for address in settings.engine_url
        }
        return Fleet(engines, settings.hold_s)

    return made


def _routing(settings: ServeSettings) -> Routing:
    """What the mixture of experts is made of.

    Raises:
        ConfigError: the model is none.
    """
    model = model_of(settings)
    routing = routing_of(model)
    if routing is None:
        raise ConfigError(f"--routed-experts: {model} is no mixture of experts")
    return routing


def _embedded(settings: ServeSettings) -> MakeEngine:
    try:
        from rollbook.engines.embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise EngineError(
            f"the embedded engine needs torch and transformers ({error}): pip install 'rollbook[engine]'"
        ) from error
    engine = EmbeddedEngine(
        model_of(settings), policy=settings.policy, device=settings.device, threads=settings.threads
    )
    fleet = Fleet({OWN: engine})

    def made(identity: Identity) -> Engine:
        engine.weights.begin_with(identity.log.own, trees=identity.log.trees)
        engine.updates.located = identity.log.store.located
        return fleet

    return made


def model_of(settings: ServeSettings) -> Path:
    """The model's directory, which all but an upstream need: its tokenizer and chat template make the ids.

    Raises:
        ConfigError: none is named.
        ModelError: it is not there.
    """
    if settings.model is None:
        raise ConfigError(
            f"--engine {settings.engine} needs --model DIR: its tokenizer and template make the ids"
        )
    folder = model_folder(settings.model, weights=settings.engine == "embedded")
    require_folder(folder, "--model")
    return folder


def upstream_of(settings: ServeSettings, secrets: ProxySecrets) -> Upstream:
    """Where `--engine upstream` passes requests to.

    Raises:
        ConfigError: it is not said, or with a login and a key, or a path that is to pass is none.
    """
    if len(settings.engine_url) != 1:
        raise ConfigError("--engine upstream needs one --engine-url, such as https://api.openai.com/v1")
    [address] = settings.engine_url
    address.headers(secrets.engine_key)  # refuses a login together with a key
    paths_of(settings.pass_path)
    upstream = Upstream(address, secrets.engine_key, settings.engine_ask, settings.pass_path)
    if settings.pass_path and not upstream.secrets:
        raise ConfigError(
            "--pass-path adds to what passes with --engine-key: without a key everything passes"
        )
    return upstream
