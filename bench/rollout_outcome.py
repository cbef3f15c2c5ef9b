"""The results of the rollouts' benchmark, as figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollbook.bench.figure import Figure, Spread, spread

LOAD, PYTHON = "load generator", "python"
SUBPROCESS, RAY = "subprocess", "ray"
PLAIN, AUTO = "plain", "auto"
PROCESS, ACTOR = "process", "actor"


@dataclass(frozen=True, slots=True)
class Lap:
    """One side's conversations of one round: rate, and CPU milliseconds a turn by process."""

    turns_per_s: float
    cpu_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Hostile:
    """The outcome of hostile agents: logged launches by status, remaining processes, and the total
    seconds."""

    by_status: Mapping[str, int]
    left: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was seen.

    Attributes:
        laps: side -> its laps, one a round.
        started: way -> milliseconds until an agent's first request, one a round.
        recovered: kind of manager -> seconds from its kill to its first new launch.
        lines: agent of an example -> lines of it that are there for Rollbook; None: no examples are here.
    """

    laps: Mapping[str, Sequence[Lap]]
    started: Mapping[str, Sequence[float]]
    hostile: Hostile
    recovered: Mapping[str, Sequence[float]]
    lines: Mapping[str, int] | None


def figures(measured: Measured) -> list[Figure]:
    """The figures, in the order of their goals."""
    laps, started, hostile = measured.laps, measured.started, measured.hostile
    shown = [_rate("rollouts.python_per_s", laps, PYTHON, LOAD, "the proxy's own, by the load generator")]
    over = [ours - plain for ours, plain in zip(started[AUTO], started[PLAIN], strict=True)]
    against = f"subprocess, the same program: {median(started[PLAIN]):.1f} ms"
    shown.append(Figure("rollouts.subprocess_overhead_ms", median(over), "ms", against, None, len(over)))
    counts = ", ".join(f"{count} {status}" for status, count in sorted(hostile.by_status.items()))
    against = f"{sum(hostile.by_status.values())} launches in {hostile.wall_s:.0f} s: {counts}"
    shown.append(Figure("rollouts.leaked", hostile.left, "processes", against, None, 1))
    if RAY in laps:
        against = "the same agents as plain subprocesses"
        shown.append(_rate("rollouts.ray_vs_plain", laps, RAY, SUBPROCESS, against))
    for kind, seconds in measured.recovered.items():
        name = "rollouts.recover_s" if kind == PROCESS else f"rollouts.recover_{kind}_s"
        shown.append(Figure(name, median(seconds), "s", f"longest: {max(seconds):.1f} s", None, len(seconds)))
    if measured.lines is not None:
        most = max(measured.lines.values())
        against = ", ".join(f"{agent}: {count}" for agent, count in sorted(measured.lines.items()))
        shown.append(Figure("rollouts.lines_to_integrate", most, "lines", against, None, len(measured.lines)))
    return shown


def _rate(name: str, laps: Mapping[str, Sequence[Lap]], ours: str, theirs: str, what: str) -> Figure:
    mine, others = ([lap.turns_per_s for lap in laps[side]] for side in (ours, theirs))
    ratio = median(a / b for a, b in zip(mine, others, strict=True))
    against = f"{what}: {median(others):.0f} turns/s"
    return Figure(name, median(mine), "turns/s", against, ratio, len(mine))


def spreads(measured: Measured) -> Iterator[Spread]:
    """How much the rounds vary."""
    for side, laps in measured.laps.items():
        yield spread(side, "turns/s", [lap.turns_per_s for lap in laps])
        for process in laps[0].cpu_ms:
            values = [lap.cpu_ms[process] for lap in laps]
            yield spread(f"{side}, CPU a turn: {process}", "ms", values)
    for way, took in measured.started.items():
        yield spread(f"to the first request, {way}", "ms", took)
    for kind, seconds in measured.recovered.items():
        yield spread(f"to the first launch after a kill, {kind}", "s", seconds)
