"""`loop.*`: the online loop's throughput, its ledger, and proof that `kill -9` of its parts loses
nothing.

Agents with long-tailed latencies talk to the real `rollbook serve`; the real `rollbook train`
learns from the log's tail (GRPO, a tiny Qwen3, Megatron on the CPU) and syncs each new version,
verified, to a scripted SGLang. Every setting runs the same agents, batches and number of steps,
in turns. Then the processes of further loops are killed at any moment, and their logs are
checked (`bench.loop_checks`).
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollbook.bench.figure import Outcome
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_kills import Killed, KillPlan, kill_in_a_store
from rollbook.bench.loop_lap import Lap, lap_of
from rollbook.bench.loop_outcome import (
    ASYNC,
    BUDGET,
    NO_ADMISSION,
    ON_POLICY,
    STREAMING,
    Measured,
    figures,
    spreads,
)
from rollbook.bench.loop_stage import Loop, Setting, loop_of, write_model
from rollbook.bench.rounds import Limit, order
from rollbook.store.cut import Cut

KILLS = 200
SETTINGS = {
    ON_POLICY: Setting(ON_POLICY, 0),
    STREAMING: Setting(STREAMING, 1, sync_every=2),
    BUDGET: Setting(BUDGET, 4),
    ASYNC: Setting(ASYNC, 4, partial=True),
    NO_ADMISSION: Setting(NO_ADMISSION, 4, partial=True, hold=False, order="age"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        steps_each: optimizer steps of a run; the first `warm_up` are not timed.
        run_s: longest that a run may take.
        cuts: earlier cuts of a run at which its ledger is looked at.
        kills: in all, `of_a_store` to a store, `side_by_side` stores at once.
        kill_limit_s: no further store after that many seconds.
        seed: of the first store; the others follow.
    """

    limit: Limit = field(default_factory=lambda: Limit(2, 120.0))
    agents: int = 32
    steps_each: int = 13
    warm_up: int = 3
    run_s: float = 120.0
    cuts: int = 4
    settings: tuple[str, ...] = tuple(SETTINGS)
    kills: int = KILLS
    of_a_store: int = 25
    side_by_side: int = field(default_factory=lambda: max(1, min(3, (os.cpu_count() or 1) // 2)))
    kill_limit_s: float = 420.0
    seed: int = 0
    killing: KillPlan = field(default_factory=KillPlan)

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds * len(self.settings) + self.kills


def sized(scale: float) -> Plan:
    """So many times 200 kills."""
    return Plan(kills=round(KILLS * scale))


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Run the loop in every setting, then kill parts of it; calls `on_round` after each run and kill.

    Raises:
        BenchError: a process failed that nobody killed.
    """
    model = write_model(folder / "model")
    laps: dict[str, list[Lap]] = {name: [] for name in plan.settings}
    deadline = time.monotonic() + plan.limit.seconds
    for number in range(plan.limit.rounds):
        for name in order(plan.settings, number):
            laps[name].append(_lap(folder / f"{name}-{number}", model, SETTINGS[name], plan, number))
            on_round()
        if time.monotonic() >= deadline:
            break
    return Measured(laps, kill(folder, model, plan, on_round))


def _lap(folder: Path, model: Path, setting: Setting, plan: Plan, number: int) -> Lap:
    """One run, from the first activation of weights to the last step."""
    setting = replace(setting, steps=plan.steps_each)
    habits = Habits("", seed=number, agents=plan.agents)
    with loop_of(folder, model, setting, habits) as loop:
        loop.start()
        loop.await_weights(plan.run_s)
        loop.agents.ask(do="begin")
        cuts = _until_trained(loop, plan, random.Random(number))
        report = loop.agents.ask(do="report")
        if report["strange"]:
            raise loop.agents.failed(f"got answers that no client expects: {report['strange'][:3]}")
    return lap_of(loop.log, cuts, plan.warm_up, setting.max_staleness)


def _until_trained(loop: Loop, plan: Plan, rng: random.Random) -> list[Cut]:
    """Wait for the last step; heads of the log at random moments on the way."""
    heads: list[Cut] = []
    deadline = time.monotonic() + plan.run_s
    while loop.trainer.running:
        heads.append(loop.log.head())
        if time.monotonic() > deadline:
            raise loop.trainer.failed(f"took no {plan.steps_each} steps within {plan.run_s:g} s")
        loop.trainer.wait(rng.uniform(0.05, 0.5))
    if loop.trainer.code != 0:
        raise loop.trainer.failed(f"ended with {loop.trainer.code}")
    return rng.sample(heads, min(plan.cuts, len(heads)))


def kill(folder: Path, model: Path, plan: Plan, on_kill: Callable[[], None]) -> list[Killed]:
    """Kill parts of loops, each in a store of its own, some in parallel; every violation is printed."""
    deadline = time.monotonic() + plan.kill_limit_s

    def one(number: int) -> Killed | None:
        if number and time.monotonic() > deadline:
            return None
        seed, done = plan.seed + number, number * plan.of_a_store
        kills = min(plan.of_a_store, plan.kills - done)
        return kill_in_a_store(folder / f"kills-{number}", model, seed, kills, plan.killing, on_kill)

    with ThreadPoolExecutor(plan.side_by_side) as pool:
        results = [k for k in pool.map(one, range(-(-plan.kills // plan.of_a_store))) if k is not None]
    for text in (text for killed in results for text in killed.wrong):
        print(text, file=sys.stderr)
    return results


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(tuple(figures(measured)), tuple(spreads(measured)))
