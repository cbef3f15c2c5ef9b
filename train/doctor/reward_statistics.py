"""What can be said of rewards before anything learns from them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollbook.train.algorithms.rollouts import Floats
from rollbook.train.doctor.check import Fault

MOSTLY_EQUAL = 0.95
"""Share of equal rewards from which on they are worth a look."""


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Rewards of trajectories.

    Attributes:
        count: how many there are; not_finite: of these, those that are NaN or infinite.
        mean, deviation, least, greatest: of the finite ones; 0 where there are none.
        commonest: the most frequent of them, the least of several; equal: the share of them that it is.
        groups: those with two rewards or more; flat: of these, those whose rewards are all equal.
    """

    count: int = 0
    not_finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    least: float = 0.0
    greatest: float = 0.0
    commonest: float = 0.0
    equal: float = 0.0
    groups: int = 0
    flat: int = 0

    @property
    def finite(self) -> int:
        """How many are numbers."""
        return self.count - self.not_finite

    def said(self) -> str:
        """In a line."""
        if not self.finite:
            return f"{self.count} rewards"
        return (
            f"{self.count} rewards, mean {self.mean:.3g}, deviation {self.deviation:.3g}, most often "
            f"{self.commonest:.3g} ({self.equal:.0%})"
        )


def statistics_of(rewards: Sequence[float] | Floats, groups: Sequence[str | None]) -> RewardStatistics:
    """Statistics of rewards, each of a trajectory of a group; None: of no group."""
    values = np.asarray(rewards, np.float64)
    good = values[np.isfinite(values)]
    members: dict[str, list[float]] = {}
    for group, value in zip(groups, values.tolist(), strict=True):
        if group is not None and np.isfinite(value):
            members.setdefault(group, []).append(value)
    several = [of for of in members.values() if len(of) > 1]
    if not len(good):
        return RewardStatistics(len(values), len(values))
    different, times = np.unique(good, return_counts=True)
    return RewardStatistics(
        count=len(values),
        not_finite=len(values) - len(good),
        mean=float(good.mean()),
        deviation=float(good.std()),
        least=float(good.min()),
        greatest=float(good.max()),
        commonest=float(different[times.argmax()]),
        equal=float(times.max() / len(good)),
        groups=len(several),
        flat=sum(min(of) == max(of) for of in several),
    )


def equality(rewards: RewardStatistics, lever: str) -> list[Fault]:
    """What is wrong with rewards that hardly differ."""
    if rewards.finite > 1 and rewards.equal == 1:
        return [Fault("red", "all are equal, so no rollout is better than another", lever)]
    if rewards.finite > 1 and rewards.equal >= MOSTLY_EQUAL:
        return [Fault("yellow", "nearly all are equal, so most batches teach nothing", lever)]
    return []


def flatness(rewards: RewardStatistics, lever: str) -> list[Fault]:
    """What is wrong with groups whose rewards do not differ."""
    if not rewards.groups or rewards.flat <= rewards.groups / 2:
        return []
    if rewards.flat == rewards.groups:
        return [
            Fault("red", "a group of equal rewards has no advantages: no step would have a gradient", lever)
        ]
    return [Fault("yellow", "most groups have no advantages: their tasks are too easy or too hard", lever)]
