"""`cluster.*`: one log over several hosts.

- `vs_local`, `cpu`: a proxy that ships to object storage, over one without a medium, in turns.
- `ack_p99_ms`: an append that NATS acknowledges. `visible_p99_ms`: until another host sees an event.
- `catchup_mb_s`: a host that joins. `adopted_s`: what a dead host had open answers again.
- `lost`, `doubled`, `changed`: of what clients were told, in rounds of faults (`cluster_rounds`); `wrong`:
  all else that did not hold there.
- What other modules measure of several hosts, where they are here: `cluster_tables`, `cluster_ray`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollbook import store
from rollbook.bench.cluster_outcome import NATS, OBJECTS, Lap, Measured, Rounds, outcome
from rollbook.bench.cluster_rounds import rounds
from rollbook.bench.cluster_stage import (
    FIRST,
    PROXIES,
    SECOND,
    Kind,
    Medium,
    environment,
    medium_of,
    say_in_medium,
    stage_of,
)
from rollbook.bench.cluster_storage import CREDENTIALS
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_stage import write_model
from rollbook.bench.processes import BenchError, Process, module
from rollbook.bench.proxy import CHAT, Stage
from rollbook.bench.proxy import Plan as ProxyPlan
from rollbook.bench.proxy_outcome import PROXY
from rollbook.bench.rounds import order
from rollbook.ingest.trajectories.place import owner_of
from rollbook.store.config import toml_text
from rollbook.store.hosts.join import join
from rollbook.store.settings import OwnMediumSettings

__all__ = ["Plan", "measure", "outcome"]

LOCAL, SHIPPED = "local", "shipped"
PARTS = ("cluster_tables", "cluster_ray")
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        laps: of a proxy, a side each; trajectories: of a lap, of `turns` turns, `concurrency` at a time.
        appends: of a run of acknowledgements; seconds: of a run of events that are to be seen.
        megabytes: that a host catches up with.
        faults: rounds of faults over each medium, with each acknowledgement.
        parts: modules that measure more.
    """

    runs: int = 3
    laps: int = 6
    trajectories: int = 96
    turns: int = 8
    concurrency: int = 32
    appends: int = 300
    rate: float = 200.0
    seconds: float = 10.0
    megabytes: int = 96
    adoptions: int = 2
    open_trajectories: int = 4
    faults: int = 6
    parts: tuple[str, ...] = PARTS

    @property
    def steps(self) -> int:
        """How often `on_round` will be called."""
        kinds = 4 if self.faults else 0
        return self.laps + 1 + 4 * self.runs + self.adoptions + kinds + len(self.parts)


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Measure one thing after the other in `folder`.

    Raises:
        BenchError: a process failed.
    """
    measured = Measured("")
    if plan.laps:
        _proxies(folder / "proxies", plan, measured, on_round)
    for medium in (OBJECTS, NATS):
        _between(folder / medium, plan, medium, measured, on_round)
    model = write_model(folder / "model", width=32)
    for number in range(plan.adoptions):
        measured.adopted_s += _adopted(folder / f"adopted-{number}", model, plan)
        on_round()
    for kind in [Kind(medium, ack) for medium in (OBJECTS, NATS) for ack in ("medium", "local")]:
        if plan.faults:
            measured.rounds.append(_faults(folder / f"{kind.medium}-{kind.ack}", model, kind, plan.faults))
            on_round()
    for name in plan.parts:
        if importlib.util.find_spec(f"rollbook.bench.{name}") is not None:
            part: Any = importlib.import_module(f"rollbook.bench.{name}")
            (folder / name).mkdir()
            measured.more.append(part.outcome(part.measure(folder / name, part.Plan(), lambda: None)))
        on_round()
    return measured


# A proxy ------------------------------------------------------------------------------------------


def _proxies(folder: Path, plan: Plan, measured: Measured, on_round: Callable[[], None]) -> None:
    """Two proxies that take turns: one ships. The storage server has a core of its own, if there are two."""
    folder.mkdir()
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    ours, others = cores[0], cores[1] if len(cores) > 1 else cores[0]
    measured.cores = (
        f"proxy, engine and agents share one core, the storage server has {len(cores) - 1} others"
    )
    set_up = Stage.set(folder, ProxyPlan())
    stage = Stage(folder, ours, set_up.material)
    with ExitStack() as stack:
        medium = stack.enter_context(_medium(folder / "medium", OBJECTS, others))
        sides: dict[str, tuple[Process, str, Process]] = {}
        for name in (LOCAL, SHIPPED):
            log = store.open(folder / name, create=True)
            if name == SHIPPED:
                _configure(log.path, medium, "local")
            engine = stack.enter_context(stage.engine(f"engine-{name}"))
            proxy, url = stage.proxy(engine.url(), name)
            sides[name] = (stack.enter_context(proxy), url, engine)
        load = stack.enter_context(stage.python("load", "load_generator", folder / "material.json"))
        storage_s = wall_s = 0.0
        for number in range(-1, plan.laps):
            for name in order([LOCAL, SHIPPED], max(number, 0)):
                before = medium.storage.cpu_s()
                lap, took = _lap(load, sides[name], plan, f"{name}-{number}", 1000 * (number + 2))
                if name == SHIPPED:
                    storage_s, wall_s = storage_s + medium.storage.cpu_s() - before, wall_s + took
                if number >= 0:
                    (measured.shipped if name == SHIPPED else measured.local).append(lap)
            on_round()
        measured.storage_cores = storage_s / wall_s


def _lap(
    load: Process, side: tuple[Process, str, Process], plan: Plan, name: str, seed: int
) -> tuple[Lap, float]:
    proxy, url, _ = side
    command: dict[str, Any] = {"do": "turns", "url": url, "path": CHAT, "kind": PROXY, "finish": True}
    command |= {"concurrency": plan.concurrency, "trajectories": plan.trajectories, "turns": plan.turns}
    before = proxy.cpu_s()
    report = load.ask(**command, name=name, seed=seed)
    if report["wrong"]:
        raise load.failed(f"got {report['wrong']} wrong replies: {report['reasons']}")
    cpu, turns = proxy.cpu_s() - before, report["turns"]
    return Lap(turns / report["wall_s"], 1e3 * cpu / turns), report["wall_s"]


@contextmanager
def _medium(folder: Path, name: str, cores: str = "all") -> Iterator[Medium]:
    """A medium's servers, which stores may lead to."""
    with (
        medium_of(folder, name, "127.0.0.1", cores) as medium,
        environment({**CREDENTIALS, "ROLLBOOK_ALLOW": medium.allowed}),
    ):
        yield medium


def _configure(path: Path, medium: Medium, ack: str) -> OwnMediumSettings:
    """Let a store go over a medium, as its first host, straight to the storage server."""
    endpoint = medium.storage_url if medium.brokers is None else None
    settings = OwnMediumSettings.model_validate({"url": medium.url, "endpoint": endpoint, "ack": ack})
    (path / "store.toml").write_text(toml_text({"medium": settings.table()}))
    return settings


# Between hosts --------------------------------------------------------------------------------------


def _between(folder: Path, plan: Plan, name: str, measured: Measured, on_round: Callable[[], None]) -> None:
    """Acknowledgements, what another host sees, and one that joins."""
    folder.mkdir()
    with _medium(folder / "medium", name) as medium:
        for number in range(plan.runs):
            own = folder / str(number)
            own.mkdir()
            with _pair(own, medium, "local") as (writer, reader, _, _):
                measured.visible_ms.setdefault(name, []).append(_visible(writer, reader, plan, number))
            if name == NATS:
                with _pair(own / "acknowledged", medium, "medium") as (writer, _, _, _):
                    writer.ask(do="acknowledged", count=20)
                    measured.ack_ms.append(writer.ask(do="acknowledged", count=plan.appends))
            on_round()
            with _pair(own / "filled", medium, "local") as (writer, _, url, settings):
                size = writer.ask(do="fill", megabytes=plan.megabytes)
                begun = time.perf_counter()
                join(own / "joined", url, settings)
                measured.catchup_mb_s.setdefault(name, []).append(size / (time.perf_counter() - begun) / 1e6)
            shutil.rmtree(own)
            on_round()


@contextmanager
def _pair(
    folder: Path, medium: Medium, ack: str
) -> Iterator[tuple[Process, Process, str, OwnMediumSettings]]:
    """Processes of two hosts of a new store: (writer, reader, the store's address, its settings)."""
    folder.mkdir(exist_ok=True)
    log = store.open(folder / "a", create=True)
    settings = _configure(log.path, medium, ack)
    say_in_medium(log, settings)
    url = f"{settings.url}/{log.store_id}"
    join(folder / "b", url, settings)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(
                Process(name, module("rollbook.bench.cluster_sides", folder / name), folder, "all")
            )
            for name in "ab"
        ]
        yield sides[0], sides[1], url, settings


def _visible(writer: Process, reader: Process, plan: Plan, seed: int) -> list[float]:
    # A reader that begins takes a third of a second to load what it needs.
    reader.send(do="watch", seconds=2.0)
    writer.ask(do="stream", rate=plan.rate, seconds=1.0, seed=seed + 100)
    reader.answer()
    reader.send(do="watch", seconds=plan.seconds + 3.0)
    time.sleep(0.2)
    count = writer.ask(do="stream", rate=plan.rate, seconds=plan.seconds, seed=seed)
    seen: list[float] = reader.answer()
    if len(seen) != count:
        raise BenchError(f"{count} events were written, and {len(seen)} seen on the other host")
    return seen


# Faults -------------------------------------------------------------------------------------------


def _adopted(folder: Path, model: Path, plan: Plan) -> list[float]:
    """Kill all of a host; seconds until each trajectory that it had open answers at the other one."""
    kind = Kind(OBJECTS, "local", lease_s=6.0, trains=False)
    with stage_of(folder, model, kind, Habits("")) as stage:
        stage.start()
        names = [f"open-{n}" for n in range(64)]
        own = [n for n in names if PROXIES[owner_of(n, len(PROXIES))] == SECOND][: plan.open_trajectories]
        url = stage.url(FIRST)
        for name in own:
            while _ask(url, name, "first", 20.0) is None:
                time.sleep(0.1)
        time.sleep(2.0)
        for key in stage.of(SECOND):
            stage.victims[key].end()
        begun, took = time.monotonic(), list[float]()
        left = list(own)
        while left:
            if time.monotonic() > begun + PATIENCE_S:
                raise BenchError(f"{left} of a dead host answer not within {PATIENCE_S:.0f} s")
            left = [name for name in left if _ask(url, name, "second", 20.0) is None]
            took = [*took, *[time.monotonic() - begun] * (len(own) - len(left) - len(took))]
            time.sleep(0.05)
        return took


def _ask(url: str, name: str, text: str, timeout_s: float) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    try:
        reply = httpx.post(f"{url}/t/{name}/v1/chat/completions", json=body, timeout=timeout_s)
    except httpx.TransportError:
        return None
    return reply.json() if reply.status_code == 200 else None


def _faults(folder: Path, model: Path, kind: Kind, count: int) -> Rounds:
    seed = random.SystemRandom().getrandbits(24)
    found = rounds(folder, model, kind, seed, count, lambda _: None)
    wrong = [f"seed {seed}: {text}" for text in [*found.wrong, *found.lost, *found.doubled, *found.changed]]
    return Rounds(
        medium=kind.medium,
        ack=kind.ack,
        count=count,
        replies=found.answered,
        apart=found.apart,
        lost=len(found.lost),
        doubled=len(found.doubled),
        changed=len(found.changed),
        lost_with_disks=found.lost_with_disks,
        worst_s=found.worst_s,
        orphaned=found.orphaned,
        wrong=wrong,
    )
