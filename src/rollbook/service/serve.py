"""`rollbook service`: the base model, the log and the routes, in a process until it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.edge.keys import Keys
from rollbook.edge.listening import Announce, serve_alone
from rollbook.engines.embedded.engine import EmbeddedEngine
from rollbook.engines.engine import ServesAdapters
from rollbook.engines.sglang.adapters import SglangAdapters
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import WeightLog
from rollbook.service.app import build_service_app
from rollbook.service.config import SamplerConfig, ServiceConfig
from rollbook.service.journal import Journal
from rollbook.service.order import LANE, MOST_PROCESSES, RUN, SharedOrder
from rollbook.service.sampling import HeldWhole, Sampler, Samplers
from rollbook.service.service import TrainingService
from rollbook.service.stop_texts import Texts
from rollbook.service.worker import Worker
from rollbook.store import Event, Store
from rollbook.store.errors import ConfigError, LaneLockedError
from rollbook.store.events import Record, RunOpened
from rollbook.store.log.writer import LaneWriter
from rollbook.train.model.model import choose_device
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.operations import POLICY

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
        CatalogError: other processes serve with this one, and the catalog cannot be reached.
    """
    bases = _bases(config) if config.trains else {}
    served = _served(config, bases)
    with _journal(config, log, config.trains, served) as journal:
        worker = Worker(journal, bases, config.models, config.full) if bases else None
        samplers = _samplers(config, journal, served, engine_keys)
        shapes = {one.name: one.shape for one in served}
        rank, whole = config.limits.rank, config.full > 0
        service = TrainingService(journal, shapes, samplers, worker, rank, whole)
        serve_alone(lambda mine: build_service_app(service, keys, mine), host, port, announce)


def work(
    config: ServiceConfig, log: Store, announce: Callable[[], None], ended: Callable[[], object]
) -> None:
    """Do operations of models beside other processes.

    Args:
        announce: called once, before the first operation is done.
        ended: waits until it is to end.

    Raises:
        ConfigError: there are no other processes.
        ModelError: the base model cannot be trained.
        CatalogError: the catalog cannot be reached.
    """
    if not config.shared:
        raise ConfigError("a worker needs shared = true: others accept what it does")
    bases = _bases(config)
    with _journal(config, log, True, _served(config, bases)) as journal:
        worker = Worker(journal, bases, config.models, config.full)
        worker.start()
        announce()
        ended()
        journal.stop()
        worker.stop()
        journal.close()


@dataclass(frozen=True, slots=True)
class Served:
    """A base model, as those know it who do not train it.

    Attributes:
        name: what clients call it; run: of what is sampled from it.
        digest: of its weights.
        sampler: what samples from it.
    """

    name: str
    folder: Path
    run: str
    digest: str
    shape: ModelShape
    sampler: SamplerConfig


def _served(config: ServiceConfig, loaded: Mapping[str, Base]) -> list[Served]:
    """The base models of a CONFIG.

    Args:
        loaded: those that are in memory.

    Raises:
        ModelError: one cannot be trained.
    """
    served = list[Served]()
    for name, wanted in config.served().items():
        folder, base = Path(wanted.base), loaded.get(name)
        digest = digest_tensors(read_weights(folder)) if base is None else base.digest
        shape = read_shape(folder) if base is None else base.policy.shape
        run = f"{RUN}-{digest[:16]}"  # another base model's weights are another run's version 0
        served.append(Served(name, folder, run, digest, shape, wanted.sampler))
    return served


def _bases(config: ServiceConfig) -> dict[str, Base]:
    """The base models, in memory.

    Raises:
        ModelError: one cannot be trained.
    """
    return {
        name: load_base(
            name,
            Path(base.base),
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            recompute=config.recompute,
        )
        for name, base in config.served().items()
    }


@contextlib.contextmanager
def _journal(config: ServiceConfig, log: Store, trains: bool, served: Sequence[Served]) -> Iterator[Journal]:
    """Context: the journal of this process, which is alone, or one of several.

    Raises:
        ConfigError: it is to be one of several, by a store of which each host has a folder of its own.
    """
    if config.shared and log.carrier is not None:
        raise ConfigError(
            f"shared = true: {log.path} is a folder of its own of a store of several hosts ([medium] in its "
            "store.toml), and processes of a service share one folder: start one process, or use a store "
            "without a medium"
        )
    remedy, settings = "end it, or have both share the store: shared = true", config.model_dump(mode="json")
    with log.claim("service", remedy, shared=config.shared), _writer(log, config.shared) as writer:
        order = SharedOrder(log, writer.lane, writer.recovered.next_seq, trains) if config.shared else None
        journal = Journal(log, writer, order)
        journal.operations.bounds = config.limits.bounds()
        for one in served:
            opened = RunOpened("service", settings | {"weights_digest": one.digest}, one.name)
            journal.open([Event(opened, run=one.run)])
        yield journal


def _writer(log: Store, shared: bool) -> LaneWriter:
    """The writer of a lane of its own: the first that no other process writes."""
    numbers = range(2, MOST_PROCESSES + 1) if shared else ()
    *lanes, last = LANE, *(f"{LANE}-{number}" for number in numbers)
    for lane in lanes:
        with contextlib.suppress(LaneLockedError):
            return log.writer(lane)
    return log.writer(last)


def _samplers(
    config: ServiceConfig, journal: Journal, served: Sequence[Served], keys: EngineKeys
) -> Samplers:
    made = {one.name: _sampler(config, journal, one, keys) for one in served if one.sampler.engine != "none"}
    return Samplers(journal, made, config.base_name)


def _sampler(config: ServiceConfig, journal: Journal, served: Served, keys: EngineKeys) -> Sampler:
    """What samples from a base model, and from adapters beside it."""
    wanted, folder = served.sampler, served.folder

    def embedded() -> EmbeddedEngine:
        return EmbeddedEngine(
            folder,
            device=choose_device(config.device).type,
            batch_tokens=wanted.batch_tokens,
            cache_blocks=wanted.cache_blocks,
            adapters=True,
        )

    engine: ServesAdapters
    whole: HeldWhole | None = None
    if wanted.engine == "sglang":
        if not wanted.url:
            raise ConfigError("sampler.engine = sglang needs sampler.url, such as http://127.0.0.1:30000")
        engine = sglang_engine(wanted.url, journal, folder, wanted.adapters, keys, served.run)
    else:
        engine = embedded()
        whole = HeldWhole(embedded, journal) if config.full else None
    named = served.name, served.run, served.digest
    return Sampler(journal, engine, *named, Texts.of(folder), wanted.adapters, whole)


def sglang_engine(
    url: str,
    journal: Journal,
    base: Path,
    adapters: int,
    keys: EngineKeys = (None, None),
    run: str = RUN,
) -> SglangAdapters:
    """An SGLang server that serves a base model: its weights are version 0 of a run of the service.

    Args:
        base: folder of the model; adapters: that the server holds at once.
    """

    async def write(record: Record) -> Any:
        await journal.write([Event(record, run=run)])

    weights = Identity(WeightLog(journal.log, run, POLICY), write, base)
    key, admin_key = keys
    return SglangAdapters(url, weights, base, most=adapters, key=key, admin_key=admin_key)
