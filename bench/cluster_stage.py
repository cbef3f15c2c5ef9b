"""One run over several hosts: two with a proxy, a trainer's with its engine, and one that follows.

`rollbook serve`, `train`, the sealer, `store follow`, NATS and the sync of weights are real; object storage
is moto's, the engine's tokens and the agents are scripted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rollbook import store
from rollbook.bench.cluster_machines import Machine, Network, network
from rollbook.bench.cluster_nats import NatsServers, free_ports, nats_servers
from rollbook.bench.cluster_outcome import NATS
from rollbook.bench.cluster_storage import BUCKET, CREDENTIALS
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_processes import COMMAND, ENGINE, Victim
from rollbook.bench.loop_stage import RUN, WEIGHTS, Setting
from rollbook.bench.processes import BenchError, Process, module
from rollbook.store import Store
from rollbook.store.config import toml_text
from rollbook.store.events import SyncFinished
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.join import join
from rollbook.store.log.store import Store as LogStore
from rollbook.store.log.tail import Filter
from rollbook.store.secret import SECRET, store_secret
from rollbook.store.settings import OwnMediumSettings, RemoteSettings

FIRST, SECOND, TRAINER, FOLLOWER, LATER = "p0", "p1", "t", "f", "later"
"""The hosts; the last one joins when all is over."""
PROXIES = (FIRST, SECOND)
READY_S = 90.0
ABANDON_S = 30.0
"""A finish that was lost with a disk leaves its trajectory open, and its group's steps wait for that."""
SMALL = {"append": {"segment_bytes": 1 << 16}, "seal": {"keep_wal_bytes": 1 << 17}}
"""So that some of the log is sealed, and is removed, while it is written."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How hosts are joined.

    Attributes:
        medium: `objects` or `nats`.
        ack: of the medium's settings, as is `lease_s`.
        trains: whether there is a trainer.
        apart: whether hosts have namespaces; None: where they can be had.
    """

    medium: str
    ack: str
    lease_s: float = 4.0
    trains: bool = True
    apart: bool | None = None


@dataclass(slots=True)
class Medium:
    """What hosts are joined by: its processes, and how it is named.

    Attributes:
        url, endpoint: of the settings.
        brokers: of NATS; gate: before object storage.
        storage: the process that has the objects, at `storage_url` without the gate.
    """

    url: str
    endpoint: str
    storage: Process
    storage_url: str
    gate: Victim
    brokers: NatsServers | None

    @property
    def allowed(self) -> str:
        """What stores may lead to."""
        names = [f"s3://{BUCKET}", *(u.removeprefix("http://") for u in (self.endpoint, self.storage_url))]
        return ",".join([*names, self.url.removeprefix("nats://")] if self.brokers is not None else names)


@contextlib.contextmanager
def medium_of(folder: Path, kind: str, address: str, cores: str = "all") -> Iterator[Medium]:
    """The servers of a medium, and object storage in any case, as checkpoints and units go there."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(
            Process("storage", module("rollbook.bench.cluster_storage", "storage"), folder, cores)
        )
        behind = storage.url()
        [port] = free_ports(1, address)
        words = ["gate", address, port, behind]
        gate = Victim("gate", "rollbook.bench.cluster_storage", words, folder / "gate.log")
        gate.start()
        stack.callback(gate.end)
        brokers = stack.enter_context(nats_servers(folder / "nats", 3, address)) if kind == NATS else None
        url = f"s3://{BUCKET}/team" if brokers is None else brokers.url
        yield Medium(url, f"http://{address}:{port}", storage, behind, gate, brokers)


@dataclass(slots=True)
class Stage:
    """The run, its hosts and their processes.

    Attributes:
        victims: (host, what) -> process.
    """

    folder: Path
    kind: Kind
    net: Network
    medium: Medium
    machines: dict[str, Machine]
    victims: dict[tuple[str, str], Victim]
    agents: Process
    store_id: str
    down: set[tuple[str, str]] = field(default_factory=set)
    """Processes that are not to run now."""

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of a host."""
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        return {**quiet, **CREDENTIALS, "ROLLBOOK_ALLOW": self.medium.allowed}

    def store(self, host: str) -> Path:
        """The folder of a host's store, as seen from outside."""
        return self.machines[host].own / "store"

    def opened(self, host: str) -> Store:
        """A host's store, opened by this process, which is a process of that host then."""
        carrier = Carrier(self.store(host), self.store_id, self.settings())
        carrier.catch_up()
        return LogStore(self.store(host), self.store_id, carrier=carrier)

    def of(self, host: str) -> list[tuple[str, str]]:
        """The processes of a host."""
        return [key for key in self.victims if key[0] == host]

    def start(self) -> None:
        """Start all, and wait until proxies answer and an engine has weights."""
        for victim in self.victims.values():
            victim.start()
        for host in PROXIES:
            self.victims[host, "proxy"].await_http(f"{self.url(host)}/healthz")
        if self.kind.trains:
            self._await_weights()

    def url(self, host: str) -> str:
        """Of a host's proxy."""
        return f"http://{self.machines[host].address}:{_port(self.net, PROXIES.index(host))}"

    def _await_weights(self) -> None:
        deadline = time.monotonic() + READY_S
        log = self.opened(FIRST)
        try:
            with log.tail(wanted=Filter(frozenset([SyncFinished.KIND]))) as tail:
                while not tail.poll():
                    if time.monotonic() > deadline:
                        raise self.victims[TRAINER, "trainer"].failed("gave the engine no weights")
                    time.sleep(0.05)
        finally:
            closed(log)

    def tend(self) -> int:
        """Start again what ended by itself; how many."""
        ended = 0
        for key, victim in self.victims.items():
            if key not in self.down and victim.code is not None:
                ended += 1
                victim.ends += 1
                victim.start()
        return ended

    @contextlib.contextmanager
    def paused(self, host: str) -> Iterator[None]:
        """Context: nothing of a host runs, as where its machine hangs."""
        pids = [self.victims[key].pid for key in self.of(host) if self.victims[key].running]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """Context: nothing from a host reaches the medium; clients and other hosts reach it."""
        self.machines[host].cut_off(self.net.outside)
        try:
            yield
        finally:
            self.machines[host].heal(self.net.outside)

    def replies(self) -> int:
        """How many clients have by now."""
        return int(self.agents.ask(do="count")["replies"])

    def await_replies(self, more: int, seconds: float) -> None:
        """Wait until clients have more, starting again what ends meanwhile.

        Raises:
            BenchError: they have not in time.
        """
        wanted, deadline = self.replies() + more, time.monotonic() + seconds
        while (have := self.replies()) < wanted:
            self.tend()
            if time.monotonic() > deadline:
                raise BenchError(f"clients have {have} replies, {wanted} were due in {seconds:.0f} s")
            time.sleep(0.1)

    def join(self, host: str) -> None:
        """Make a host's folder one of the store."""
        settings = self.settings()
        join(self.store(host), f"{settings.url}/{self.store_id}", settings, self.remote())
        self.configure(host)

    def remote(self) -> RemoteSettings:
        """Where all hosts' sealed units go."""
        return RemoteSettings(uri=f"s3://{BUCKET}/units", endpoint=self.medium.endpoint)

    def settings(self) -> OwnMediumSettings:
        """Of every host's medium."""
        return OwnMediumSettings(
            url=self.medium.url,
            endpoint=self.medium.endpoint if self.medium.brokers is None else None,
            ack="medium" if self.kind.ack == "medium" else "local",
            lease_s=self.kind.lease_s,
        )

    def configure(self, host: str) -> None:
        """Write a host's settings, and the secret that all share."""
        tables = {"medium": self.settings().table(), "remote": self.remote().table(), **SMALL}
        (self.store(host) / "store.toml").write_text(toml_text(tables))
        shutil.copy(self.folder / SECRET, self.store(host) / SECRET)
        (self.store(host) / SECRET).chmod(0o600)


def say_in_medium(log: Store, settings: OwnMediumSettings) -> None:
    """Let a medium know of a store, as the first process of its first host does."""
    with contextlib.closing(Carrier(log.path, log.store_id, settings)) as first:
        assert first.session.valid


def closed(log: Store) -> None:
    """End what a store that was opened here does for its host."""
    if log.carrier is not None:
        log.carrier.close()  # type: ignore[attr-defined]


def _port(net: Network, number: int) -> int:
    """Hosts apart have all the same ones."""
    return 8000 + (0 if net.apart else 10 + number)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, and of those that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def stage_of(folder: Path, model: Path, kind: Kind, habits: Habits) -> Iterator[Stage]:
    """The run in a folder, whose processes end with the context. Nothing of a host is started yet."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(folder / "net", apart=kind.apart))
        medium = stack.enter_context(medium_of(folder / "medium", kind.medium, net.outside))
        stack.enter_context(environment({**CREDENTIALS, "ROLLBOOK_ALLOW": medium.allowed}))
        medium.gate.await_http(medium.endpoint)
        machines = {name: net.machine(name) for name in (*PROXIES, TRAINER, FOLLOWER, LATER)}
        log = store.open(machines[FIRST].own / "store", create=True)
        store_secret(log.path, "peers")
        shutil.copy(log.path / SECRET, folder / SECRET)
        urls = " ".join(f"http://{machines[h].address}:{_port(net, n)}" for n, h in enumerate(PROXIES))
        habits = replace(habits, url=urls)
        (folder / "habits.json").write_bytes(orjson.dumps(asdict(habits)))
        agents = stack.enter_context(
            Process("agents", module("rollbook.bench.loop_agents", folder / "habits.json"), folder, "all")
        )
        made = Stage(folder, kind, net, medium, machines, {}, agents, log.store_id)
        made.configure(FIRST)
        say_in_medium(log, made.settings())
        for host in (SECOND, TRAINER, FOLLOWER):
            made.join(host)
        made.victims.update(_victims(made, model, habits, urls.split()))
        try:
            yield made
        finally:
            for victim in made.victims.values():
                victim.end()


def _victims(stage: Stage, model: Path, habits: Habits, urls: list[str]) -> dict[tuple[str, str], Victim]:
    folder, found = stage.folder, dict[tuple[str, str], Victim]()

    def add(host: str, what: str, main: str, words: list[Any]) -> None:
        log = folder / f"{host}-{what}.log"
        found[host, what] = Victim(
            what, main, words, log, stage.environment, place=stage.machines[host].place
        )

    def disk(host: str) -> Path:
        return stage.machines[host].disk / "store"

    engine, port = stage.machines[TRAINER], 8100
    pace = {"tokenizer": str(model / "tokenizer.json"), "first_s": 0.02, "token_s": 0.002, "mark": "0"}
    (folder / "pace.json").write_bytes(orjson.dumps(pace))
    scripted = ["--script", "rollbook.bench.loop_engine:paced", "--model-path", model, "--weights", WEIGHTS]
    scripted += ["--host", engine.address, "--port", port, "--given", folder / "pace.json"]
    add(TRAINER, "engine", ENGINE, scripted)
    engine_url = f"http://{engine.address}:{port}"
    for number, host in enumerate(PROXIES):
        words: list[Any] = ["serve", "--store", disk(host), "--model", model, "--engine", "sglang"]
        words += ["--engine-url", engine_url, "--host", stage.machines[host].address, "--run", RUN]
        words += ["--port", _port(stage.net, number), "--hold-s", 5, "--no-seal", "--proxy", number]
        words += ["--abandon-s", ABANDON_S]
        add(host, "proxy", COMMAND, [*words, *(word for url in urls for word in ("--proxies", url))])
        add(host, "sealer", COMMAND, ["store", "seal", "--watch", "--store", disk(host)])
    add(FOLLOWER, "follower", COMMAND, ["store", "follow", "--store", disk(FOLLOWER)])
    if stage.kind.trains:
        setting = Setting(
            "cluster",
            max_staleness=4,
            groups=1,
            group_size=habits.group_size,
            steps=1_000_000,
            checkpoint_every=4,
            idle_timeout_s=600.0,
        )
        (folder / "loop.toml").write_text(setting.config(model, [engine_url]))
        words = ["train", folder / "loop.toml", "--store", disk(TRAINER), "--source", "tail"]
        add(TRAINER, "trainer", COMMAND, words)
    return found
