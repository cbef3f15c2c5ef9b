"""What `rollbook serve` loads before it records anything, and what each worker makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI

from rollbook.engines.engine import Engine
from rollbook.engines.hub import model_said, name_at_hub
from rollbook.engines.startup_check import check_engines
from rollbook.engines.weights.identify import Identity
from rollbook.ingest.cluster.setup import Cluster
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.family import Family
from rollbook.ingest.serve.options import MakeEngine, ServeOptions, make_engine, model_of, upstream_of
from rollbook.ingest.serve.proxy import build_app, identity_of
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.ingest.upstream.paths import Upstream
from rollbook.ingest.upstream.proxy import SERVER_OPTIONS, build_upstream_app
from rollbook.store.events import Json, RunOpened


class Prepared(Protocol):
    """A proxy whose parts are loaded."""

    options: ServeOptions
    headers: Mapping[str, bool]
    """For uvicorn: which headers it adds to replies."""

    def looked_at(self, recorder: Recorder) -> Json:
        """Check the engines, record that the run is opened, and say what `Started` says of them.

        Raises:
            RollbookError: an engine cannot be used.
        """

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The application; with others, if it is not the only process that records the run."""


def prepared(options: ServeOptions) -> Prepared:
    """Load what the options name.

    Raises:
        RollbookError: something cannot be used.
    """
    if options.engine == "upstream":
        return ForUpstream(options, upstream_of(options))
    model = model_of(options)
    tokenizer = load_chat_tokenizer(model)
    family = choose_family(options.reply_format, model, tokenizer.template_source)
    make = make_engine(options, tokenizer)
    return ForTokens(options, model, family, make, Bridges.tested(tokenizer, options.tree))


@dataclass(slots=True, eq=False)
class ForUpstream:
    """Passes requests on and records what passed."""

    options: ServeOptions
    upstream: Upstream
    headers: Mapping[str, bool] = field(default_factory=lambda: SERVER_OPTIONS)

    def looked_at(self, recorder: Recorder) -> Json:
        """Record that the run is opened."""
        recorder.append(RunOpened("serve", self.options.as_json())).result()
        return {"upstream": self.upstream.url}

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The record-only proxy."""
        shared = self.options.proxy.share(self.options.workers)
        return build_upstream_app(recorder, self.upstream, shared, self.options.policy, others)


@dataclass(slots=True, eq=False)
class ForTokens:
    """Renders and tokenizes here, and has an engine answer."""

    options: ServeOptions
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
        config = self.options.as_json() | {"reply_format": self.family.name, "refused": self.bridges.refused}
        config |= model_said(self.model)
        digests = (self.bridges.tokenizer.tokenizer_digest, self.bridges.tokenizer.template_digest)
        recorder.append(RunOpened("serve", config, str(self.model), *digests)).result()
        return {"reply_format": self.family.name, "refused": self.bridges.refused, "notes": notes}

    def app(self, recorder: Recorder, others: Cluster | None = None) -> FastAPI:
        """The proxy."""
        engine, identity = self._engine(recorder)
        turn_runner = TurnRunner(recorder, engine, self.bridges, self.family, self.options.hold_s)
        shared = self.options.proxy.share(self.options.workers)
        name = (name_at_hub(self.model) or self.model.resolve().name).split("/")[-1].split("@")[0]
        return build_app(turn_runner, shared, name, identity, others)

    def _engine(self, recorder: Recorder) -> tuple[Engine, Identity]:
        """The engine, and who identifies its weights; of one recorder the same."""
        if self._made is None or self._made[0] is not recorder:
            identity = identity_of(recorder, self.options.policy, self.model)
            self._made = recorder, self.make(identity), identity
        return self._made[1:]
