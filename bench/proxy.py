"""`proxy.*`: the recording proxy between agents and an engine that takes almost no time.

The proxy is the real `rollbook serve --engine sglang`, durable; the engine a scripted server of
SGLang's protocol; the agents a process that checks every reply. They share two cores. In each
round the same conversations go through the proxy, whole and streamed, to a bare echo, and
through LiteLLM's proxy. Then, with one request in flight, each request is repeated to the engine
itself, with the same ids: the difference is the proxy's. At the end everything recorded is
compared with the engine's script.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollbook.bench import litellm_peer
from rollbook.bench.figure import Outcome
from rollbook.bench.load_generator import ECHO
from rollbook.bench.processes import Process, module, some_cores
from rollbook.bench.proxy_outcome import (
    LITELLM,
    PROXY,
    STREAM,
    Big,
    Lap,
    Measured,
    Pair,
    Recorded,
    figures,
    spreads,
)
from rollbook.bench.proxy_workers import ONE, PROXIES, SHARED, SIDES, TWO, WorkersLap, workers_lap
from rollbook.bench.recorded import Commits, check
from rollbook.bench.rounds import Limit, order
from rollbook.bench.scripted.dialogues import Material, make_material, write_model, write_replies
from rollbook.testing.asgi import free_port

CHAT, ECHO_PATH = "/t/NAME/v1/chat/completions", "/echo"
SEED = 1000
"""Conversations of a round begin at its number times this."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(5, 100.0))
    cores: int = 2
    concurrency: int = 64
    trajectories: int = 128
    """Conversations of a side in a round, `concurrency` of them at a time."""
    echo_trajectories: int = 512
    litellm_trajectories: int = 64
    turns: int = 8
    pairs: int = 12
    """Conversations a round with one request in flight, each request asked of the engine too."""
    long_turns: int = 129
    looked_at: tuple[int, ...] = (5, 32, 64, 128)
    """Turns of the long conversation, counted from 1, that are looked at, with the one before and after."""
    big: int = 512
    big_bytes: int = 3_000_000
    big_timeout_s: float = 120.0
    commits: int = 60
    """Commits of a turn a round, by the store alone."""
    litellm: bool = True
    workers_trajectories: int = 64
    """Conversations of a lap of the proxies of one and two workers."""

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return 2 * self.limit.rounds + 1


@dataclass(frozen=True, slots=True)
class Stage:
    """What processes need to start: where their files go, their cores, and the conversations."""

    folder: Path
    cores: str
    material: Material

    @classmethod
    def set(cls, folder: Path, plan: Plan) -> Stage:
        """Write the model directory, with weights for engine and proxy to agree on, and the conversations."""
        material = make_material()
        tokenizer = write_model(folder / "model")
        save_file({"model.norm.weight": np.ones(8, np.float32)}, folder / "model" / "model.safetensors")
        write_replies(folder / "replies.json", material, tokenizer)
        material.write(folder / "material.json")
        return cls(folder, some_cores(plan.cores), material)

    def engine(self, name: str = "engine") -> Process:
        """The scripted engine. It remembers one request, to be repeated."""
        words = [
            "--script",
            "rollbook.bench.scripted.dialogues:by_mark",
            "--given",
            self.folder / "replies.json",
        ]
        words += ["--log", 1, "--images", "--stream-interval", 8]
        words += ["--model-path", self.folder / "model", "--weights", "float32"]
        command = module("rollbook.bench.scripted.serve", *words)
        return Process(name, command, self.folder, self.cores)

    def proxy(
        self, engine: str, name: str, workers: int = 1, of: Sequence[str] = (), number: int = 0
    ) -> tuple[Process, str]:
        """The proxy over a store of that name, ready; and its address.

        Args:
            of: the addresses of all proxies, if it is one of several, and `number` which one.
        """
        port = int(of[number].rpartition(":")[2]) if of else free_port()
        words = ["serve", "--engine", "sglang", "--engine-url", engine, "--model", self.folder / "model"]
        words += ["--store", self.folder / name, "--port", port, "--run", "bench", "--images"]
        words += ["--workers", workers]
        if of:
            words += [word for url in of for word in ("--proxies", url)] + ["--proxy", number]
        process = Process(
            f"{name}-{number}", module("rollbook.cli.app", *words), self.folder, self.cores, talks=False
        )
        url = f"http://127.0.0.1:{port}"
        process.await_http(f"{url}/healthz")
        return process, url

    def litellm(self, program: Path, upstream: str) -> tuple[Process, str]:
        """LiteLLM's proxy, ready; and its address."""
        port = free_port()
        words = litellm_peer.command(program, self.folder, upstream, port)
        process = Process(
            "litellm",
            words,
            self.folder,
            self.cores,
            litellm_peer.ENVIRONMENT | {"PYTHONPATH": ""},
            talks=False,
        )
        url = f"http://127.0.0.1:{port}"
        process.await_http(f"{url}/health/liveliness")
        return process, url

    def python(self, name: str, part: str, *words: object) -> Process:
        """A part of the benchmark as a process."""
        return Process(name, module(f"rollbook.bench.{part}", *words), self.folder, self.cores)


@dataclass(frozen=True, slots=True)
class Side:
    """One route for the same conversations: the load's command, and the processes that answer it."""

    command: Mapping[str, Any]
    processes: Mapping[str, Process]


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Start everything, take turns, end everything. Calls `on_round` after each round.

    Raises:
        BenchError: a process failed, or an agent got another reply than the engine gave.
    """
    stage = Stage.set(folder, plan)
    with ExitStack() as stack:
        load = stack.enter_context(stage.python("load", "load_generator", folder / "material.json"))
        engine = stack.enter_context(stage.engine())
        engine_url = engine.url()
        proxy, url = stage.proxy(engine_url, "store")
        stack.enter_context(proxy)
        sides = _sides(stage, plan, stack, proxy, url, engine)
        bench = _Bench(plan, load, sides, url, engine_url)
        bench.warm_up()
        commits = stack.enter_context(closing(Commits(folder / "store", folder / "commits")))
        bench.run(commits, on_round)
        other = stack.enter_context(stage.engine("engine-2"))  # an engine's weights have one proxy's name
        two, two_url = stage.proxy(other.url(), "of-two", 2)
        stack.enter_context(two)
        third = stack.enter_context(stage.engine("engine-3"))
        third_url = third.url()
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        peers = [stage.proxy(third_url, "of-peers", of=urls, number=number)[0] for number in range(2)]
        for peer in peers:
            stack.enter_context(peer)
        proxies = {
            ONE: ([proxy], url, engine),
            TWO: ([two], two_url, other),
            PROXIES: (peers, urls[0], third),
        }
        laps, turns = _workers(plan, load, proxies, on_round)
        replies = folder / "replies.json"
        results = [
            check(folder / "store", replies, bench.turns + turns[ONE]),
            check(folder / "of-two", replies, turns[TWO]),
            check(folder / "of-peers", replies, turns[PROXIES]),
        ]
        recorded = Recorded(sum(result.turns for result in results), sum(result.wrong for result in results))
        peak = {name: p.peak_rss() for side in sides.values() for name, p in side.processes.items()}
    big = _big(stage, plan) if plan.big else None
    on_round()
    of_bench = (bench.laps, bench.pairs, bench.long, bench.commit_ms)
    return Measured(*of_bench, recorded, peak, big, laps, stage.cores.count(",") + 1)


def _workers(
    plan: Plan,
    load: Process,
    proxies: Mapping[str, tuple[Sequence[Process], str, Process]],
    on_round: Callable[[], None],
) -> tuple[dict[str, list[WorkersLap]], Counter[str]]:
    """(the laps of one and of two workers, and of two proxies; the turns that each took)"""
    laps: dict[str, list[WorkersLap]] = {side: [] for side in SIDES}
    size = {"concurrency": plan.concurrency, "trajectories": plan.workers_trajectories, "turns": plan.turns}
    turn_counts, deadline = Counter[str](), time.monotonic() + plan.limit.seconds
    for number in range(-1, plan.limit.rounds):
        for side in order(list(SIDES), max(number, 0)):
            which = side.removesuffix(SHARED)
            processes, url, engine = proxies[which]
            command = size | {"do": "turns", "url": url, "path": CHAT, "kind": PROXY, "finish": True}
            command |= {"name": f"workers-{number}-{SIDES.index(side)}", "seed": SEED * (number + 2)}
            lap, turns = workers_lap(load, engine, processes, command | {"shared": SHARED in side})
            turn_counts[which] += turns
            if number >= 0:  # the first round warms up
                laps[side].append(lap)
        if number >= 0:
            on_round()
            if time.monotonic() >= deadline:
                break
    return laps, turn_counts


def _sides(
    stage: Stage, plan: Plan, stack: ExitStack, proxy: Process, url: str, engine: Process
) -> dict[str, Side]:
    size = {"do": "turns", "concurrency": plan.concurrency, "trajectories": plan.trajectories}
    size |= {"turns": plan.turns}
    ours = size | {"url": url, "path": CHAT, "kind": PROXY, "finish": True}
    both = {"proxy": proxy, "engine": engine}
    echo = stack.enter_context(stage.python("echo", "echo"))
    sides = {
        PROXY: Side(ours, both),
        STREAM: Side(ours | {"stream": True}, both),
    }
    bare = {"url": echo.url(), "path": ECHO_PATH, "kind": ECHO, "trajectories": plan.echo_trajectories}
    sides[ECHO] = Side(size | bare, {"echo": echo})
    program = litellm_peer.find() if plan.litellm else None
    if program is None:
        print(f"proxy.vs_litellm is left out: {litellm_peer.REMEDY}", file=sys.stderr)
        return sides
    scripted = module("rollbook.bench.scripted.openai", stage.folder / "material.json")
    upstream = stack.enter_context(Process("upstream", scripted, stage.folder, stage.cores))
    peer, peer_url = stage.litellm(program, upstream.url())
    stack.enter_context(peer)
    command = size | {"url": peer_url, "path": "/v1/chat/completions", "kind": LITELLM}
    command |= {"trajectories": plan.litellm_trajectories}
    return sides | {LITELLM: Side(command, {"litellm": peer, "upstream": upstream})}


class _Bench:
    """The rounds, and their results."""

    def __init__(self, plan: Plan, load: Process, sides: Mapping[str, Side], url: str, engine: str) -> None:
        self._plan, self._load, self._sides = plan, load, sides
        self._one = {"do": "pairs", "url": url, "engine": engine, "path": CHAT}
        self.laps: dict[str, list[Lap]] = {name: [] for name in sides}
        self.pairs: list[Pair] = []
        self.long: list[Mapping[int, list[Pair]]] = []
        self.commit_ms: list[float] = []
        self.turns = 0
        """Answered by the proxy."""

    def warm_up(self) -> None:
        """A round that is not counted."""
        for name in self._sides:
            self._lap(name, -1)
        self._pairs(-1)

    def run(self, commits: Commits, on_round: Callable[[], None]) -> None:
        """The rounds."""
        names = list(self._sides)
        deadline = time.monotonic() + self._plan.limit.seconds
        for number in range(self._plan.limit.rounds):
            for name in order(names, number):
                self.laps[name].append(self._lap(name, number))
            self.pairs += self._pairs(number)
            self.commit_ms += commits.take(self._plan.commits)
            self.long.append(self._long(number))
            on_round()
            if time.monotonic() >= deadline:
                break

    def _ask(self, command: Mapping[str, Any]) -> Any:
        report = self._load.ask(**command)
        if report["wrong"]:
            raise self._load.failed(f"got {report['wrong']} wrong replies: {report['reasons']}")
        return report

    def _lap(self, name: str, number: int) -> Lap:
        side = self._sides[name]
        before = {key: process.cpu_s() for key, process in side.processes.items()}
        seed = SEED * (number + 1)
        report = self._ask({**side.command, "name": f"{name}-{number}", "seed": seed})
        cpu = {key: process.cpu_s() - before[key] for key, process in side.processes.items()}
        turns = report["turns"]
        if name in (PROXY, STREAM):
            self.turns += turns
        cpu_ms = {key: 1e3 * s / turns for key, s in (cpu | {"load": report["cpu_s"]}).items()}
        return Lap(turns / report["wall_s"], cpu_ms, report["whole_ms"], report["first_ms"])

    def _converse(self, name: str, seed: int, turns: int, at: Iterable[int]) -> list[tuple[int, Pair]]:
        report = self._ask({**self._one, "name": name, "seed": seed, "turns": turns, "at": list(at)})
        self.turns += report["turns"]
        return [(turn, Pair(through, direct)) for turn, through, direct in report["added"]]

    def _pairs(self, number: int) -> list[Pair]:
        turns = self._plan.turns
        seeds = range(SEED * (number + 1), SEED * (number + 1) + self._plan.pairs)
        every = [self._converse(f"one-{number}-{seed}", seed, turns, range(turns)) for seed in seeds]
        return [pair for pairs in every for _, pair in pairs]

    def _long(self, number: int) -> dict[int, list[Pair]]:
        """By the turn looked at: the pairs of it and its neighbours."""
        near = {turn: range(turn - 2, turn + 1) for turn in self._plan.looked_at}
        at = sorted({turn for turns in near.values() for turn in turns})
        by_turn = dict(self._converse(f"long-{number}", SEED * number, self._plan.long_turns, at))
        return {turn: [by_turn[position] for position in turns] for turn, turns in near.items()}


def _big(stage: Stage, plan: Plan) -> Big:
    """The big bodies, all at once, against a proxy and an engine of their own."""
    with ExitStack() as stack:
        load = stack.enter_context(stage.python("load", "load_generator", stage.folder / "material.json"))
        engine = stack.enter_context(stage.engine())
        proxy, url = stage.proxy(engine.url(), "big-store")
        stack.enter_context(proxy)
        report = load.ask(
            **{"do": "big", "url": url, "path": CHAT, "name": "big", "timeout_s": plan.big_timeout_s},
            **{"count": plan.big, "size": plan.big_bytes},
        )
        disk = sum(f.stat().st_size for f in (stage.folder / "big-store").rglob("*") if f.is_file())
        return Big(
            *(plan.big, plan.big_bytes, report["wrong"], report["reasons"], report["wall_s"]),
            *(proxy.peak_rss(), disk, engine.peak_rss()),
        )


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(tuple(figures(measured)), tuple(spreads(measured)))
