"""The online loop on loopback: its model, its configuration, and its processes.

`rollbook serve`, `rollbook train`, the sealer, the store, and the syncs with their verification
over disk are real; the engines' tokens and the agents are scripted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rollbook import store
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_processes import COMMAND, ENGINE, Victim
from rollbook.bench.processes import Process, module
from rollbook.store import Store
from rollbook.store.events import SyncFinished
from rollbook.store.log.tail import Filter
from rollbook.testing.asgi import free_port

RUN, WEIGHTS = "loop", "float32"


@dataclass(frozen=True, slots=True)
class Setting:
    """How the loop is configured.

    Attributes:
        hold, order: of `[admission]`.
        partial: update in the middle of requests; `pause` says how.
        segment_bytes: of the log; small ones are sealed while the loop runs.
        mode, overlap: of CONFIG, and of its `[sync]`; algorithm: further lines of its table.
    """

    name: str
    max_staleness: int
    sync_every: int = 1
    partial: bool = False
    pause: str = "retract"
    hold: bool = True
    order: str = "windowed"
    groups: int = 4
    group_size: int = 4
    steps: int = 12
    checkpoint_every: int = 100
    engines: int = 1
    first_s: float = 0.02
    token_s: float = 0.004
    hold_s: float = 20.0
    idle_timeout_s: float = 60.0
    segment_bytes: int | None = None
    mode: str = "async"
    overlap: bool = False
    algorithm: str = ""

    def config(self, model: Path, engines: list[str]) -> str:
        """The CONFIG of `rollbook train`."""
        return f"""\
run = "{RUN}"
model = "{model}"
steps = {self.steps}
threads = 1
device = "cpu"
checkpoint_every = {self.checkpoint_every}
idle_timeout_s = {self.idle_timeout_s}
mode = "{self.mode}"
[algorithm]
name = "grpo"
groups = {self.groups}
group_size = {self.group_size}
{self.algorithm}[recipe]
max_staleness = {self.max_staleness}
drop_zero_variance = false
[admission]
hold = {_toml(self.hold)}
order = "{self.order}"
[optimizer]
lr = 1e-3
[sync]
engines = {orjson.dumps(engines).decode()}
transport = "disk"
sync_every = {self.sync_every}
overlap = {_toml(self.overlap)}
partial_rollout = {_toml(self.partial)}
pause = "{self.pause}"
drain_s = 20
timeout_s = 10
"""


def _toml(value: bool) -> str:
    return str(value).lower()


def write_model(folder: Path, width: int = 96, layers: int = 2) -> Path:
    """A tiny Qwen3 with its tokenizer; what a loop starts from."""
    from rollbook.demo.model import make_model

    make_model(folder, seed=0, width=width, layers=layers)
    return folder


@dataclass(slots=True)
class Loop:
    """One loop: a store, and the processes around it."""

    folder: Path
    setting: Setting
    proxy_url: str
    log: Store
    engines: list[Victim]
    engine_urls: list[str]
    proxy: Victim
    trainer: Victim
    sealer: Victim | None
    agents: Process

    def all(self) -> Iterator[Victim]:
        """Everything that may be killed."""
        yield from self.engines
        yield from (self.proxy, self.trainer)
        if self.sealer is not None:
            yield self.sealer

    def tend(self) -> None:
        """Restart processes that ended with an error."""
        for victim in self.all():
            victim.tend()

    def start(self) -> None:
        """Start everything; the agents begin once there is a proxy."""
        for engine, url in zip(self.engines, self.engine_urls, strict=True):
            engine.start()
            engine.await_http(f"{url}/health")
        self.proxy.start()
        self.trainer.start()
        if self.sealer is not None:
            self.sealer.start()
        self.proxy.await_http(f"{self.proxy_url}/healthz")

    def await_weights(self, seconds: float) -> None:
        """Wait until an engine has the trainer's weights: earlier requests are not held back.

        Raises:
            BenchError: none has in that time.
        """
        deadline = time.monotonic() + seconds
        with self.log.tail(wanted=Filter(frozenset([SyncFinished.KIND]))) as tail:
            while not tail.poll():
                if self.trainer.code is not None or time.monotonic() > deadline:
                    raise self.trainer.failed("gave the engines no weights")
                time.sleep(0.02)


@contextmanager
def loop_of(folder: Path, model: Path, setting: Setting, habits: Habits) -> Iterator[Loop]:
    """A loop in a folder, whose processes end with the context. The agents wait for the command to
    begin."""
    folder.mkdir()
    log = store.open(folder / "store", create=True)
    if setting.segment_bytes is not None:
        (log.path / "store.toml").write_text(_small(setting.segment_bytes))
    ports = [free_port() for _ in range(setting.engines + 1)]
    urls = [f"http://127.0.0.1:{number}" for number in ports]
    engines, proxy_url = urls[:-1], urls[-1]
    (folder / "loop.toml").write_text(setting.config(model, engines))
    pace = {
        "tokenizer": str(model / "tokenizer.json"),
        "first_s": setting.first_s,
        "token_s": setting.token_s,
    }
    for number in range(setting.engines):
        (folder / f"pace-{number}.json").write_bytes(orjson.dumps(pace | {"mark": str(number)}))
    habits = replace(habits, url=proxy_url, group_size=setting.group_size)
    (folder / "habits.json").write_bytes(orjson.dumps(asdict(habits)))
    victim = _victims(folder)
    scripted = ["--script", "rollbook.bench.loop_engine:paced", "--model-path", model, "--weights", WEIGHTS]
    serve = ["serve", "--store", log.path, "--model", model, "--engine", "sglang", "--port", ports[-1]]
    serve += ["--run", RUN, "--hold-s", setting.hold_s, "--no-seal"]
    serve += [word for url in engines for word in ("--engine-url", url)]
    train = ["train", folder / "loop.toml", "--store", log.path, "--source", "tail"]
    agents = Process("agents", module("rollbook.bench.loop_agents", folder / "habits.json"), folder, "all")
    loop = Loop(
        folder,
        setting,
        proxy_url,
        log,
        [
            victim(f"engine-{n}", ENGINE, [*scripted, "--port", p, "--given", folder / f"pace-{n}.json"])
            for n, p in enumerate(ports[:-1])
        ],
        engines,
        victim("proxy", COMMAND, serve),
        victim("trainer", COMMAND, train),
        victim("sealer", COMMAND, ["store", "seal", "--watch", "--store", log.path])
        if setting.segment_bytes is not None
        else None,
        agents,
    )
    try:
        yield loop
    finally:
        agents.stop()
        for process in loop.all():
            process.end()


def _victims(folder: Path) -> Callable[[str, str, list[Any]], Victim]:
    offline: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "100"}
    return lambda name, main, words: Victim(name, main, words, folder / f"{name}.log", offline)


def _small(segment_bytes: int) -> str:
    """Small segments, so that some of the log is sealed while the loop runs."""
    return f"[append]\nsegment_bytes = {segment_bytes}\n[seal]\nkeep_wal_bytes = {4 * segment_bytes}\n"
