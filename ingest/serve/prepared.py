"""What `rollbook serve` loads before it records anything, and what each worker makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI

from rollbook.engines.engine import Engine
from rollbook.engines.hub import hub_reference, name_at_hub
from rollbook.engines.startup_check import check_engines
from rollbook.engines.weights.identify import Identity
from rollbook.ingest.cluster.setup import Cluster
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.family import Family
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.serve.engines import MakeEngine, make_engine, model_of, upstream_of
from rollbook.ingest.serve.proxy import build_app, identity_of
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.bridge import Bridges, TreePolicy
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.ingest.upstream.paths import Upstream
from rollbook.ingest.upstream.proxy import SERVER_OPTIONS, build_upstream_app
from rollbook.store.events import Json, RunOpened


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
