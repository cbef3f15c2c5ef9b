"""Sides of a benchmark that take turns in one run, so that a noisy neighbour affects them all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Work = Callable[[], object]
Side = Callable[[int], Work]
"""Round number -> the work to time. Whatever the work needs is made before it is returned, untimed."""


@dataclass(frozen=True, slots=True)
class Limit:
    """When to stop: after `rounds`, or after `seconds` if that comes first; one round at least."""

    rounds: int
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of a side's work in one round: wall time, and CPU time of this process (all threads)."""

    wall_s: float
    cpu_s: float


def always(work: Work) -> Side:
    """A side that does the same work in each round."""
    return lambda _: work


Laps = Mapping[str, Sequence[Lap]]
"""Side -> its laps, one a round."""


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: over the rounds everyone comes before everyone else equally often."""
    turn = number // 2 % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned if number % 2 == 0 else turned[::-1]


def interleave(sides: Mapping[str, Side], limit: Limit, on_round: Callable[[], None]) -> Laps:
    """Time each side once a round, after a warm-up round. Calls `on_round` after each round."""
    names = list(sides)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for name in names:
        sides[name](-1)()
    deadline = time.monotonic() + limit.seconds
    for number in range(limit.rounds):
        for name in order(names, number):
            laps[name].append(_timed(sides[name](number)))
        on_round()
        if time.monotonic() >= deadline:
            break
    return laps


def _timed(work: Work) -> Lap:
    gc.collect()  # what preparing left is not collected on the work's time
    cpu, begun = time.process_time(), time.perf_counter()
    work()
    return Lap(time.perf_counter() - begun, time.process_time() - cpu)


def walls(laps: Sequence[Lap]) -> list[float]:
    """Wall seconds, round by round."""
    return [lap.wall_s for lap in laps]


def times_faster(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of their seconds divided by ours: how many times as fast we are."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))
