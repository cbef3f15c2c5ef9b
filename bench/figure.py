"""The results of a benchmark: figures for machines, spreads for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a benchmark.

    Attributes:
        figure: its name, such as append.vs_raw.
        value, unit: the median over the runs, unless the name says otherwise.
        against: what it is compared with, with that side's own value, as text; None for nothing.
        ratio: median over the runs of this side over the other; None where no goal is a ratio.
        runs: how many rounds were measured.
    """

    figure: str
    value: float
    unit: str
    against: str | None
    ratio: float | None
    runs: int

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Spread:
    """How much the rounds of one measured quantity vary."""

    what: str
    unit: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything one benchmark found."""

    figures: tuple[Figure, ...]
    spreads: tuple[Spread, ...]


def spread(what: str, unit: str, values: Sequence[float]) -> Spread:
    """Minimum, median and maximum of at least one value."""
    return Spread(what, unit, min(values), median(values), max(values))


def quantile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(-(-percent * len(ordered) // 100) - 1, 0)] if ordered else 0.0
