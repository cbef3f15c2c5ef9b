"""How fast the loop of agents, engine and trainer goes in each mode of running them.

Agents with long-tailed latencies, the real `rollbook serve` and `rollbook train`, a scripted SGLang. The
algorithm scores each rollout batch with the trainer's and a reference's weights before it trains on it. The
model is so large that this takes about as long as the agents do: only what takes time can be overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rollbook.bench.figure import Figure, Spread, spread
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_stage import Setting, loop_of, write_model
from rollbook.bench.processes import BenchError
from rollbook.bench.rounds import order
from rollbook.store import Store
from rollbook.store.events import StepCommitted

COLOCATE, HYBRID, ASYNC, OVERLAP = "colocate", "hybrid", "async", "async, overlapped syncs"
SCORED = 'kl = 0.01\nold = "trainer"\n'
AGENTS, WARM_UP, RUN_S = 16, 2, 120.0
WIDTH, LAYERS = 264, 6
"""Of the model: 4 million parameters."""
_SETTING = Setting(ASYNC, 1, steps=10, algorithm=SCORED)
MODES: Mapping[str, Setting] = {
    COLOCATE: replace(_SETTING, name=COLOCATE, mode=COLOCATE),
    HYBRID: replace(_SETTING, name=HYBRID, mode=HYBRID),
    ASYNC: _SETTING,
    OVERLAP: replace(_SETTING, name=OVERLAP, overlap=True),
}
"""All may use what is a version old: whether it is waited for or not is the mode's."""


@dataclass(frozen=True, slots=True)
class Laps:
    """Steps a second of each mode, round by round."""

    steps_per_s: Mapping[str, Sequence[float]]


def run_modes(folder: Path, rounds: int, on_round: Callable[[], None]) -> Laps:
    """Run the loop in each mode, in turns.

    Raises:
        BenchError: a process failed.
    """
    model = write_model(folder / "modes-model", WIDTH, LAYERS)
    rates: dict[str, list[float]] = {name: [] for name in MODES}
    for number in range(rounds):
        for place, name in enumerate(order(list(MODES), number)):
            rates[name].append(_lap(folder / f"modes-{number}-{place}", model, name, number))
        on_round()
    return Laps(rates)


def _lap(folder: Path, model: Path, name: str, number: int) -> float:
    habits = Habits("", seed=number, agents=AGENTS)
    with loop_of(folder, model, MODES[name], habits) as loop:
        loop.start()
        loop.await_weights(RUN_S)
        loop.agents.ask(do="begin")
        loop.trainer.wait(RUN_S)
        if loop.trainer.code != 0:
            raise BenchError(f"{name}: the training ended with {loop.trainer.code}")
    return _rate(loop.log)


def _rate(log: Store) -> float:
    """Steps per second, from the last warm-up step on."""
    ended = [event.time_us for event in log.events_of([StepCommitted.KIND])]
    return 1e6 * (len(ended) - WARM_UP) / (ended[-1] - ended[WARM_UP - 1])


def mode_figures(laps: Laps) -> Iterator[Figure]:
    """The figures of the modes."""
    rates = laps.steps_per_s
    if not rates:
        return
    for figure, ours, theirs in (
        ("train.hybrid_vs_colocate", HYBRID, COLOCATE),
        ("train.hybrid_vs_async", HYBRID, ASYNC),
        ("train.overlap_gain", OVERLAP, ASYNC),
    ):
        ratio = median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
        against = f"{theirs}: {median(rates[theirs]):.2f} steps/s"
        yield Figure(figure, median(rates[ours]), "steps/s", against, ratio, len(rates[ours]))


def mode_spreads(laps: Laps) -> Iterator[Spread]:
    """How much the runs of each mode vary."""
    for name, rates in laps.steps_per_s.items():
        yield spread(f"{name}: steps", "1/s", rates)
