"""`train.*`: tokens per second and memory of an optimizer step, packed, padded, and in a plain loop.

The samples have long-tailed lengths. Each side is a process of its own, and takes a step when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.rounds import order, times_faster
from rollbook.bench.train_sides import BARE, OURS, PADDED, PLAIN, PLAIN_PACKED, SIDES, make_model, samples

CLOSE = 1e-3
"""By how much the sides' first losses may differ: they are of the same samples and weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each side takes a step, after one that warms up."""

    rounds: int = 5

    @property
    def steps(self) -> int:
        """The rounds, and the one that warms up."""
        return self.rounds + 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each side's steps, round by round, and the bytes of memory that its model and steps took."""

    seconds: dict[str, list[float]]
    peaks: dict[str, int]
    tokens: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Take steps in turn.

    Raises:
        BenchError: a side failed, or its loss is another one.
    """
    model = folder / "model"
    make_model(model)
    names = list(SIDES)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Process(name, module("rollbook.bench.train_sides", name, model), folder, some_cores(2))
            )
            for name in names
        }
        first = {name: side.ask() for name, side in sides.items()}
        _check({name: answer["loss"] for name, answer in first.items()})
        on_round()
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(plan.rounds):
            for name in order(names, number):
                seconds[name].append(sides[name].ask()["seconds"])
            on_round()
        peaks = {name: side.peak_rss() - first[name]["resident"] for name, side in sides.items()}
    return Measured(seconds, peaks, sum(sample.trained for sample in samples()))


def _check(losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        if abs(loss - losses[PLAIN]) > CLOSE:
            raise BenchError(f"{name}: its first loss is {loss}, that of {PLAIN} {losses[PLAIN]}")


def outcome(measured: Measured) -> Outcome:
    """Speeds as ratios of rounds; memory as a ratio of peaks."""
    of, rate = measured.seconds, {n: measured.tokens / median(s) for n, s in measured.seconds.items()}
    rounds, ours = len(of[OURS]), rate[OURS]
    fastest = max((PLAIN, PLAIN_PACKED), key=lambda name: rate[name])
    smallest = min((PLAIN, PLAIN_PACKED), key=lambda name: measured.peaks[name])
    share = median(1 - b / a for a, b in zip(of[OURS], of[BARE], strict=True))
    peaks = {name: peak / 2**20 for name, peak in measured.peaks.items()}

    def speed(figure: str, against: str) -> Figure:
        said = f"{against}: {rate[against]:.0f} tokens/s"
        return Figure(figure, ours, "trained tokens/s", said, times_faster(of[OURS], of[against]), rounds)

    return Outcome(
        (
            speed("train.packed_vs_padded", PADDED),
            speed("train.vs_transformers", fastest),
            Figure(
                "train.peak_vs_transformers",
                peaks[OURS],
                "MiB",
                f"{smallest}: {peaks[smallest]:.0f} MiB",
                peaks[OURS] / peaks[smallest],
                1,
            ),
            Figure("train.replayability_share", share, "share of a step", f"{BARE}", None, rounds),
        ),
        tuple(spread(name, "s a step", laps) for name, laps in of.items()),
    )
