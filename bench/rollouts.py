"""`rollouts.*`: the overhead of starting, watching and scoring agents, and what is left behind.

The proxy is the real `rollbook serve`, durable, with a script as its engine; the manager runs
the rollouts of a CONFIG in a separate process, as `rollbook rollout` does. They share two cores.
In each round the same conversations come from the load generator of `bench proxy` and from
coroutines of a manager, and the same programs are started by this host's launcher and by a
launcher on a one-node Ray cluster. Hostile programs are counted by a word in their command lines
that nothing else on the host has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

import rollbook
from rollbook import store
from rollbook.bench import rollout_program
from rollbook.bench.figure import Outcome
from rollbook.bench.processes import Process, module, some_cores
from rollbook.bench.proxy_outcome import PROXY
from rollbook.bench.rollout_agents import MATERIAL, Converses
from rollbook.bench.rollout_kills import Kills
from rollbook.bench.rollout_outcome import (
    ACTOR,
    AUTO,
    LOAD,
    PLAIN,
    PROCESS,
    PYTHON,
    RAY,
    SUBPROCESS,
    Hostile,
    Lap,
    Measured,
    figures,
    spreads,
)
from rollbook.bench.rounds import Limit, order
from rollbook.bench.scripted.dialogues import make_material, write_model
from rollbook.rollouts.launchers.isolation import LEVELS, missing
from rollbook.testing.asgi import free_port

CHAT = "/t/NAME/v1/chat/completions"
SEED = 10_000
"""Conversations of a round begin at its number times this."""
PROMPT = "What does it do? #85"
DEEDS = ("daemon", "mute", "print", "crash", "fail")
"""What hostile agents do, in turn, but for every fortieth, which ignores SIGTERM."""
DEAF_EVERY = 40
RUN = "bench"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(5, 90.0))
    cores: int = 2
    concurrency: int = 256
    trajectories: int = 512
    turns: int = 4
    starts: int = 15
    """Agents that are started one after the other, each way."""
    hostile: int = 1000
    hostile_concurrency: int = 32
    programs: int = 96
    """Launches of a lap of programs, `programs_concurrency` at a time."""
    programs_concurrency: int = 8
    kills: int = 3
    """Of each kind of manager."""
    ray: bool = True

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return 2 * self.limit.rounds + 3


@dataclass(frozen=True, slots=True)
class Stage:
    """Where files go, the cores of all processes, and the proxy's URL."""

    folder: Path
    cores: str
    url: str

    def config(self, name: str, tasks: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
        """A CONFIG's values; its tasks are written."""
        path = self.folder / f"{name}.jsonl"
        path.write_bytes(b"".join(orjson.dumps(task) + b"\n" for task in tasks))
        values = {"name": name, "proxy": self.url, "tasks": str(path)}
        return values | {"folder": str(self.folder / "launches")} | changes

    def python(self, name: str, part: str, *words: object, **environment: str) -> Process:
        """A part of the benchmark as a process."""
        known = self.environment | environment
        return Process(name, module(f"rollbook.bench.{part}", *words), self.folder, self.cores, known)

    @property
    def environment(self) -> dict[str, str]:
        """Of all processes."""
        return {MATERIAL: str(self.folder / "material.json")}


@contextmanager
def served(folder: Path, plan: Plan) -> Iterator[tuple[Stage, Process]]:
    """A stage whose proxy is ready, and the proxy."""
    write_model(folder / "model")
    make_material().write(folder / "material.json")
    port = free_port()
    stage = Stage(folder, some_cores(plan.cores), f"http://127.0.0.1:{port}")
    words: list[object] = [
        "serve",
        "--engine",
        "scripted",
        "--script",
        "rollbook.bench.rollout_agents:answer",
    ]
    words += ["--model", folder / "model", "--store", folder / "store", "--port", port, "--run", RUN]
    command = module("rollbook.cli.app", *words)
    with Process("proxy", command, folder, stage.cores, stage.environment, talks=False) as proxy:
        proxy.await_http(f"{stage.url}/healthz")
        yield stage, proxy


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Start everything, take turns, end everything. Calls `on_round` after each round.

    Raises:
        BenchError: a process failed, an agent got a wrong reply, or rollouts did not end well.
    """
    ray = plan.ray and importlib.util.find_spec("ray") is not None
    with ExitStack() as stack:
        stage, proxy = stack.enter_context(served(folder, plan))
        load = stack.enter_context(stage.python("load", "load_generator", folder / "material.json"))
        manager = stack.enter_context(stage.python("manager", "rollout_side"))
        bench = _Bench(stage, plan, load, manager, proxy)
        laps = bench.rounds({LOAD: bench.load, PYTHON: bench.coroutines}, on_round)
        started = bench.started()
        on_round()
        hostile = bench.hostile()
        on_round()
        with _ray(ray) as environment:
            sides = {SUBPROCESS: bench.programs(manager, SUBPROCESS)}
            if ray:
                other = stack.enter_context(stage.python("on-ray", "rollout_side", **environment))
                sides[RAY] = bench.programs(other, RAY)
            laps |= bench.rounds(sides, on_round)
            if ray:
                other.stop()
            kinds = (PROCESS, ACTOR) if ray else (PROCESS,)
            recovered = {kind: _recovered(stage, plan, kind, environment) for kind in kinds}
        on_round()
    return Measured(laps, started, hostile, recovered, examples_lines())


@contextmanager
def _ray(wanted: bool) -> Iterator[dict[str, str]]:
    """The variables of processes that start a Ray of their own."""
    if not wanted:
        print("rollouts.ray_vs_plain and .recover_actor_s are left out: no Ray is installed", file=sys.stderr)
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:  # sockets' paths
        yield {"RAY_TMPDIR": short}


class _Bench:
    """The measurements, over a stage."""

    def __init__(self, stage: Stage, plan: Plan, load: Process, manager: Process, proxy: Process) -> None:
        self._stage, self._plan = stage, plan
        self._load, self._manager, self._proxy = load, manager, proxy

    def rounds(
        self, sides: Mapping[str, Callable[[int], Lap]], on_round: Callable[[], None]
    ) -> dict[str, list[Lap]]:
        """The laps of sides that take turns, after one warm-up each."""
        laps: dict[str, list[Lap]] = {name: [] for name in sides}
        for side in sides.values():
            side(-1)
        deadline = time.monotonic() + self._plan.limit.seconds
        for number in range(self._plan.limit.rounds):
            for name in order(list(sides), number):
                laps[name].append(sides[name](number))
            on_round()
            if time.monotonic() >= deadline:
                break
        return laps

    def load(self, number: int) -> Lap:
        """Conversations of the load generator."""
        plan = self._plan
        size = {"concurrency": plan.concurrency, "trajectories": plan.trajectories, "turns": plan.turns}
        words = {"do": "turns", "url": self._stage.url, "path": CHAT, "kind": PROXY, "finish": True}
        before = self._proxy.cpu_s()
        report = self._load.ask(**words, **size, name=f"load-{number}", seed=SEED * (number + 1))
        if report["wrong"]:
            raise self._load.failed(f"got {report['wrong']} wrong replies: {report['reasons']}")
        return self._lap(report["turns"], report, before, "load")

    def coroutines(self, number: int) -> Lap:
        """The same conversations, by coroutines of a manager."""
        plan, first = self._plan, SEED * (number + 1)
        rollout = f"{Converses.__module__}:{Converses.__name__}"
        agent = {"launcher": "python", "rollout": rollout, "options": {"turns": plan.turns}}
        tasks = [{"id": f"t{seed}", "seed": seed} for seed in range(first, first + plan.trajectories)]
        config = self._stage.config(f"python-{number}", tasks, concurrency=plan.concurrency, agent=agent)
        before = self._proxy.cpu_s()
        return self._lap(plan.trajectories * plan.turns, self._run(self._manager, config), before, "manager")

    def programs(self, manager: Process, launcher: str) -> Callable[[int], Lap]:
        """Laps of programs that a launcher starts."""
        plan = self._plan

        def lap(number: int) -> Lap:
            command = [sys.executable, "-S", rollout_program.__file__]
            tasks = [{"id": f"t{i}", "prompt": PROMPT, "turns": plan.turns} for i in range(plan.programs)]
            agent = {"launcher": launcher, "command": command}
            many = plan.programs_concurrency
            config = self._stage.config(f"{launcher}-{number}", tasks, concurrency=many, agent=agent)
            before = self._proxy.cpu_s()
            return self._lap(plan.programs * plan.turns, self._run(manager, config), before, "manager")

        return lap

    def _run(self, manager: Process, config: Mapping[str, Any]) -> Any:
        report = manager.ask(do="run", config=config)
        if report["by_status"].keys() != {"done"}:
            raise manager.failed(f"ran {config['name']}: {report['by_status']} {self._whys(config['name'])}")
        return report

    def _whys(self, rollout: str) -> list[Any]:
        with store.connect(self._stage.folder / "store") as connection:
            query = (
                "SELECT count(*), why FROM launches WHERE rollout = $1 GROUP BY why ORDER BY ALL DESC LIMIT 3"
            )
            return list(connection.execute(query, [rollout]).fetchall())

    def _lap(self, turns: int, report: Mapping[str, Any], proxy_s: float, ours: str) -> Lap:
        cpu = {"proxy": self._proxy.cpu_s() - proxy_s, ours: report["cpu_s"]}
        return Lap(turns / report["wall_s"], {name: 1e3 * s / turns for name, s in cpu.items()})

    def started(self) -> dict[str, list[float]]:
        """Milliseconds from the start of an agent to its first request: plain, and at each level."""
        levels = [level for level in LEVELS if missing(level) is None]
        task = {"prompt": PROMPT, "turns": 1}
        words = {"ways": [PLAIN, AUTO, *levels], "count": self._plan.starts + 1, "url": self._stage.url}
        where = {"folder": str(self._stage.folder / "starts"), "program": rollout_program.__file__}
        times_ms: dict[str, list[float]] = self._manager.ask(do="start", task=task, **words, **where)["took"]
        return times_ms

    def hostile(self) -> Hostile:
        """Hostile agents, some at each isolation level that works here."""
        levels = [level for level in LEVELS if level != "none" and missing(level) is None]
        word, begun = f"3{int.from_bytes(os.urandom(4)):010d}", time.monotonic()
        by_status: Counter[str] = Counter()
        for part, level in enumerate(levels):
            numbers = range(part, self._plan.hostile, len(levels))
            tasks = [_hostile(number, index, word) for index, number in enumerate(numbers)]
            command = [sys.executable, "-S", rollout_program.__file__]
            agent = {"command": command, "isolation": level, "limits": {"output_mb": 0.5}}
            clocks = {"total_s": 30.0, "idle_s": 2.0, "grace_s": 0.2}
            many = self._plan.hostile_concurrency
            changes = {"concurrency": many, "agent": agent, "clocks": clocks}
            config = self._stage.config(f"hostile-{level}", tasks, **changes)
            by_status.update(self._manager.ask(do="run", config=config)["by_status"])
        took = time.monotonic() - begun
        return Hostile(by_status, len(with_word(word)), took)


def _hostile(number: int, index: int, word: str) -> dict[str, Any]:
    deed = "deaf" if index % DEAF_EVERY == DEAF_EVERY - 1 else DEEDS[index % len(DEEDS)]
    return {"id": f"t{number}", "prompt": PROMPT, "turns": 1, "do": deed, "word": word}


def _recovered(stage: Stage, plan: Plan, kind: str, environment: Mapping[str, str]) -> list[float]:
    """Seconds from kills of a manager to the first launch after each."""
    name = f"kill-{kind}"
    tasks = [{"id": f"t{i}", "prompt": PROMPT, "turns": plan.turns} for i in range(5000)]
    values = stage.config(name, tasks, concurrency=4)
    command = {"agent.command": [sys.executable, "-S", rollout_program.__file__]}
    path = stage.folder / f"{name}.toml"
    # What JSON has for a text, a number or a list, TOML has too.
    path.write_text("".join(f"{k} = {orjson.dumps(v).decode()}\n" for k, v in (values | command).items()))
    words = (stage.folder, stage.cores, stage.folder / "store", path, name)
    return Kills(*words, {**stage.environment, **environment}).run(plan.kills, actor=kind == ACTOR)


def with_word(word: str) -> list[int]:
    """Ids of the processes with this word in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return pids


def examples_lines() -> dict[str, int] | None:
    """For each example's agent, the number of lines that are there for Rollbook; None: there are no
    examples here."""
    examples = Path(rollbook.__file__).resolve().parents[2] / "examples"
    agents = sorted(path for path in examples.glob("*/agent.*"))
    return {path.parent.name: len(lines_of_ours(path.read_text())) for path in agents} or None


def lines_of_ours(text: str) -> list[str]:
    """Lines of an agent that are there for Rollbook."""
    return [line for line in text.splitlines() if "rollbook" in line.lower()]


def sized(scale: float) -> Plan:
    """A plan of so many times 1,000 hostile agents."""
    return replace(Plan(), hostile=max(round(1000 * scale), 1))


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(tuple(figures(measured)), tuple(spreads(measured)))
