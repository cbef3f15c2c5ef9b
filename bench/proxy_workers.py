"""`proxy.workers*`, `proxy.sent_on*`: two workers, or two proxies of a run, compared with one on
the same turns.

Agents and engine share the cores with them, so the turns per second say as much about the
machine. What two workers could do follows from their CPU: how much a turn takes, and how it is
split between them. In the laps of `SHARED` every turn takes a connection from one pool, so that
half of them reach the other worker first. Of two proxies only one gets requests, so that half of
the turns are forwarded to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rollbook.bench.figure import Figure, Spread, spread
from rollbook.bench.processes import Process

ONE, TWO = "one worker", "two workers"
SHARED = ", shared connections"
PROXIES = "two proxies, of which one is asked"
SIDES = (ONE, TWO, ONE + SHARED, TWO + SHARED, PROXIES)


@dataclass(frozen=True, slots=True)
class WorkersLap:
    """One side's conversations of one round.

    Attributes:
        cpu_ms: CPU milliseconds a turn, of all workers or proxies; `busiest_ms`: of the busiest one.
        beside_ms: of agents and engine.
    """

    turns_per_s: float
    cpu_ms: float
    busiest_ms: float
    beside_ms: float

    @property
    def bound(self) -> float:
        """Turns a second that the busiest worker could do with a core of its own."""
        return 1e3 / self.busiest_ms


def workers_lap(
    load: Process, engine: Process, proxies: Sequence[Process], command: Mapping[str, Any]
) -> tuple[WorkersLap, int]:
    """(a lap, the number of its turns)

    Raises:
        BenchError: an agent got another reply than the engine gave.
    """
    before, engine_before = _cpu(proxies), engine.cpu_s()
    report = load.ask(**command)
    if report["wrong"]:
        raise load.failed(f"got {report['wrong']} wrong replies: {report['reasons']}")
    turns, after = report["turns"], _cpu(proxies)
    each = [1e3 * (seconds - before.get(pid, 0.0)) / turns for pid, seconds in after.items()]
    beside = 1e3 * (engine.cpu_s() - engine_before + report["cpu_s"]) / turns
    return WorkersLap(turns / report["wall_s"], sum(each), max(each), beside), turns


def _cpu(proxies: Sequence[Process]) -> dict[int, float]:
    return {pid: seconds for proxy in proxies for pid, seconds in proxy.cpu_by_process().items()}


def workers_figures(laps: Mapping[str, Sequence[WorkersLap]], cores: int) -> list[Figure]:
    """The figures. Pure."""
    single, double = laps[ONE], laps[TWO]
    beside = median(lap.beside_ms * lap.turns_per_s / 1e3 for lap in double)
    shown = f"one worker: {_rate(single):.0f} turns/s; agents and engine took {beside:.2f} of {cores} cores"
    bound = median(lap.bound for lap in single)
    return [
        _figure("proxy.workers", "turns/s", shown, [(b.turns_per_s, a.turns_per_s) for a, b in _pairs(laps)]),
        _figure(
            *("proxy.workers_bound", "turns/s"),
            f"one worker with a core of its own: {bound:.0f} turns/s",
            [(b.bound, a.bound) for a, b in _pairs(laps)],
        ),
        *(
            _figure(
                *(f"proxy.workers{name}_cpu", "ms"),
                f"one worker: {median(lap.cpu_ms for lap in laps[ONE + words]):.2f} ms of CPU a turn",
                [(b.cpu_ms, a.cpu_ms) for a, b in _pairs(laps, words)],
            )
            for name, words in (("", ""), ("_shared", SHARED))
        ),
        _figure(
            *("proxy.sent_on_cpu", "ms"),
            f"one proxy that is asked for its own: {median(lap.cpu_ms for lap in single):.2f} ms of CPU "
            "a turn",
            [(b.cpu_ms, a.cpu_ms) for a, b in zip(single, laps[PROXIES], strict=True)],
        ),
    ]


def _pairs(laps: Mapping[str, Sequence[WorkersLap]], words: str = "") -> list[tuple[WorkersLap, WorkersLap]]:
    return list(zip(laps[ONE + words], laps[TWO + words], strict=True))


def _rate(laps: Sequence[WorkersLap]) -> float:
    return median(lap.turns_per_s for lap in laps)


def _figure(name: str, unit: str, against: str, pairs: Sequence[tuple[float, float]]) -> Figure:
    ratio = median(ours / theirs for ours, theirs in pairs)
    return Figure(name, median(ours for ours, _ in pairs), unit, against, ratio, len(pairs))


def workers_spreads(laps: Mapping[str, Sequence[WorkersLap]]) -> list[Spread]:
    """How much the rounds vary. Pure."""
    return [
        measured
        for side, side_laps in laps.items()
        for measured in (
            spread(f"proxy of {side}", "turns/s", [lap.turns_per_s for lap in side_laps]),
            spread(f"proxy of {side}, CPU a turn", "ms", [lap.cpu_ms for lap in side_laps]),
            spread(
                f"proxy of {side}, CPU a turn of the busiest", "ms", [lap.busiest_ms for lap in side_laps]
            ),
        )
    ]
