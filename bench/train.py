"""`train.*`: tokens per second and memory of an optimizer step, packed, padded, and in a plain loop.

The samples have long-tailed lengths. Each side is a process of its own, and takes a step when its turn comes.
Then the loop of agents, engine and trainer runs in each mode (`bench.train_modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.rounds import order, times_faster
from rollbook.bench.train_checkpoints import (
    CheckpointLaps,
    checkpoint_figures,
    checkpoint_spreads,
    run_checkpoints,
)
from rollbook.bench.train_modes import Laps, mode_figures, mode_spreads, run_modes
from rollbook.bench.train_sides import (
    BARE,
    BIG,
    LARGE,
    ONE_RANK,
    OURS,
    PADDED,
    PLAIN,
    PLAIN_PACKED,
    RECOMPUTED,
    TWO_RANKS,
    make_model,
    samples,
)

RUNS = (
    (PLAIN, PLAIN_PACKED, OURS, PADDED, RECOMPUTED, BARE),
    (ONE_RANK, TWO_RANKS),
    (LARGE,),
)
"""The sides that take turns, run by run: those that are compared, and no others' memory beside theirs."""
CLOSE = 1e-3
"""By how much the sides' first losses may differ: they are of the same samples and weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each side takes a step, after one that warms up, the loop runs in each mode, and a checkpoint
    is written in each way."""

    rounds: int = 5
    mode_rounds: int = 3
    checkpoint_rounds: int = 3

    @property
    def steps(self) -> int:
        """The rounds of each run, and the one that warms up; and those of the modes and checkpoints."""
        return len(RUNS) * (self.rounds + 1) + self.mode_rounds + self.checkpoint_rounds


@dataclass(frozen=True, slots=True)
class Measured:
    """What the sides took.

    Attributes:
        seconds: of each side's steps, round by round; manifest: those of them for digests and checks, of the
            larger model.
        peaks: bytes of memory that a side's model and steps took.
        tokens: trained tokens of a step.
        modes: steps a second of each mode of running the loop.
        checkpoints: what they took.
    """

    seconds: dict[str, list[float]]
    manifest: list[float]
    peaks: dict[str, int]
    tokens: int
    modes: Laps = field(default_factory=lambda: Laps({}))
    checkpoints: CheckpointLaps = field(default_factory=CheckpointLaps)


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Take steps in turn.

    Raises:
        BenchError: a side failed, or its loss is another one.
    """
    model, large = folder / "model", folder / "large"
    make_model(model)
    make_model(large, BIG)
    measured = Measured({}, [], {}, sum(sample.trained for sample in samples()))
    losses: dict[str, float] = {}
    for names in RUNS:
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(
                    Process(name, _words(name, large if name == LARGE else model), folder, some_cores(2))
                )
                for name in names
            }
            first = {name: side.ask() for name, side in sides.items()}
            losses |= {name: answer["loss"] for name, answer in first.items() if name != LARGE}
            _check(losses)
            on_round()
            _take_turns(sides, plan, measured, on_round)
            for name, side in sides.items():
                measured.peaks[name] = side.peak_rss() - first[name]["resident"]
    checkpoints = run_checkpoints(folder, large, plan.checkpoint_rounds, on_round)
    return replace(measured, modes=run_modes(folder, plan.mode_rounds, on_round), checkpoints=checkpoints)


def _take_turns(
    sides: Mapping[str, Process], plan: Plan, measured: Measured, on_round: Callable[[], None]
) -> None:
    for number in range(plan.rounds):
        for name in order(list(sides), number):
            if len(sides) > 1:  # memory that lay idle while others took their turns comes back slowly
                sides[name].ask()
            answer = sides[name].ask()
            measured.seconds.setdefault(name, []).append(answer["seconds"])
            if name == LARGE:
                measured.manifest.append(answer["manifest"])
        on_round()


def _words(side: str, model: Path) -> list[str]:
    return module("rollbook.bench.train_sides", side, model)


def _check(losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        if abs(loss - losses[PLAIN]) > CLOSE:
            raise BenchError(f"{name}: its first loss is {loss}, that of {PLAIN} {losses[PLAIN]}")


def outcome(measured: Measured) -> Outcome:
    """Speeds as ratios of rounds; memory as a ratio of peaks."""
    seconds, rate = measured.seconds, {n: measured.tokens / median(s) for n, s in measured.seconds.items()}
    rounds = len(seconds[OURS])
    fastest = max((PLAIN, PLAIN_PACKED), key=lambda name: rate[name])
    smallest = min((PLAIN, PLAIN_PACKED), key=lambda name: measured.peaks[name])
    small = median(1 - b / a for a, b in zip(seconds[OURS], seconds[BARE], strict=True))
    share = median(part / whole for part, whole in zip(measured.manifest, seconds[LARGE], strict=True))
    peaks = {name: peak / 2**20 for name, peak in measured.peaks.items()}

    def speed(figure: str, against: str, name: str = OURS) -> Figure:
        text = f"{against}: {rate[against]:.0f} tokens/s"
        return Figure(
            figure,
            rate[name],
            "trained tokens/s",
            text,
            times_faster(seconds[name], seconds[against]),
            rounds,
        )

    def peak(figure: str, against: str, name: str = OURS) -> Figure:
        text = f"{against}: {peaks[against]:.0f} MiB"
        return Figure(figure, peaks[name], "MiB", text, peaks[name] / peaks[against], 1)

    return Outcome(
        (
            speed("train.packed_vs_padded", PADDED),
            speed("train.vs_transformers", fastest),
            peak("train.peak_vs_transformers", smallest),
            speed("train.recompute_speed", OURS, RECOMPUTED),
            peak("train.recompute_peak", OURS, RECOMPUTED),
            speed("train.dp2_vs_1", ONE_RANK, TWO_RANKS),
            Figure("train.replayability_share", share, "share of a step", LARGE, None, rounds),
            Figure("train.replayability_share_6m", small, "share of a step", BARE, None, rounds),
            *mode_figures(measured.modes),
            *checkpoint_figures(measured.checkpoints),
        ),
        (
            *(spread(name, "s a step", laps) for name, laps in seconds.items()),
            *mode_spreads(measured.modes),
            *checkpoint_spreads(measured.checkpoints),
        ),
    )
