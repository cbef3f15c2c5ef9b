"""`rollbook service`: the base model, the log and the routes, in one process until it is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollbook.edge.keys import Keys
from rollbook.edge.listening import Announce, serve_alone
from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import ServesAdapters
from rollbook.engines.sglang.adapters import SglangAdapters
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import WeightLog
from rollbook.service.app import build_service_app
from rollbook.service.config import ServiceConfig
from rollbook.service.journal import Journal
from rollbook.service.sampling import RUN, HeldWhole, Sampler
from rollbook.service.service import TrainingService
from rollbook.service.stop_texts import Texts
from rollbook.store import Event, Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import Record, RunOpened
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.operations import POLICY

LANE = "service"
EngineKeys = tuple[str | None, str | None]
"""(the key of an engine's server, that of its control routes)"""


def serve_service(
    config: ServiceConfig,
    log: Store,
    host: str,
    port: int,
    keys: Keys,
    announce: Announce,
    engine_keys: EngineKeys = (None, None),
) -> None:
    """Serve until interrupted.

    Args:
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
        ModelError: the base model cannot be trained.
        LaneLockedError: another service writes this store.
    """
    base = load_base(
        config.base_name,
        Path(config.base),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        recompute=config.recompute,
    )
    opened = RunOpened("service", config.model_dump(mode="json") | {"weights_digest": base.digest})
    with log.writer(LANE) as writer:
        writer.append([Event(opened, run=RUN)]).result()
        journal = Journal(log, writer)
        sampler = _sampler(config, journal, base, engine_keys)
        service = TrainingService(journal, base, sampler, config.models, config.full)
        serve_alone(lambda mine: build_service_app(service, keys, mine), host, port, announce)


def _sampler(config: ServiceConfig, journal: Journal, base: Base, keys: EngineKeys) -> Sampler | None:
    """What samples from the base model, and from adapters beside it."""
    wanted = config.sampler
    if wanted.engine == "none":
        return None

    def embedded() -> EmbeddedEngine:
        return EmbeddedEngine(
            base.folder,
            device=base.how.device.type,
            batch_tokens=wanted.batch_tokens,
            cache_blocks=wanted.cache_blocks,
            adapters=True,
        )

    engine: ServesAdapters
    whole: HeldWhole | None = None
    if wanted.engine == "sglang":
        if not wanted.url:
            raise ConfigError("sampler.engine = sglang needs sampler.url, such as http://127.0.0.1:30000")
        engine = sglang_engine(wanted.url, journal, base.folder, wanted.adapters, keys)
    else:
        engine = embedded()
        whole = HeldWhole(embedded, journal) if config.full else None
    return Sampler(journal, engine, base.name, base.digest, Texts.of(base.folder), wanted.adapters, whole)


def sglang_engine(
    url: str, journal: Journal, base: Path, adapters: int, keys: EngineKeys = (None, None)
) -> SglangAdapters:
    """An SGLang server that serves the base model: its weights are version 0 of the run of the service.

    Args:
        base: folder of the model; adapters: that the server holds at once.
    """

    async def write(record: Record) -> Any:
        await journal.write([Event(record, run=RUN)])

    weights = Identity(WeightLog(journal.log, RUN, POLICY), write, base)
    key, admin_key = keys
    return SglangAdapters(url, weights, base, most=adapters, key=key, admin_key=admin_key)
