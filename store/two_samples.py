"""Compares two groups of numbers: medians, and the two-sample Kolmogorov-Smirnov test.

Pure. Implemented here so that the ledger needs no SciPy for one p-value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """How many numbers, their median and 90th percentile."""

    count: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two groups side by side.

    Attributes:
        statistic: largest distance between their empirical distribution functions, 0 to 1.
        p_value: probability of at least that distance if both were drawn from one distribution.
    """

    first: Group
    second: Group
    statistic: float
    p_value: float


def compare(first: Numbers, second: Numbers) -> Comparison:
    """Compare two non-empty groups, float64 [n] and [m]."""
    statistic = ks_statistic(first, second)
    p_value = ks_p_value(statistic, len(first), len(second))
    return Comparison(_group(first), _group(second), statistic, p_value)


def _group(values: Numbers) -> Group:
    median, p90 = np.quantile(values, [0.5, 0.9])
    return Group(len(values), float(median), float(p90))


def ks_statistic(first: Numbers, second: Numbers) -> float:
    """sup over x of |F(x) - G(x)|, for the empirical distribution functions F and G of [n] and [m] numbers.

    Both are steps, so the largest distance is at one of the numbers.
    """
    at = np.concatenate([first, second])
    f = np.searchsorted(np.sort(first), at, side="right") / len(first)
    g = np.searchsorted(np.sort(second), at, side="right") / len(second)
    return float(np.abs(f - g).max())


def ks_p_value(statistic: float, n: int, m: int) -> float:
    """Asymptotic p-value of the two-sided test: Q(D sqrt(nm / (n + m))), where

        Q(x) = 2 sum_{k >= 1} (-1)^(k-1) exp(-2 k^2 x^2)

    is Kolmogorov's distribution (N. Smirnov, Table for estimating the goodness of fit of empirical
    distributions, Ann. Math. Statist. 19, 1948). Ties, as lengths have, make it larger than the exact one.
    """
    x = statistic * math.sqrt(n * m / (n + m))
    if x < 0.2:  # Q is 1 there to 12 digits, and its series is slow
        return 1.0
    terms = [math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return min(1.0, 2 * (sum(terms[::2]) - sum(terms[1::2])))
