"""Baselines: advantages of trajectories from the rewards of their groups. Pure, without a loop over groups.

A trajectory counts once in its group, however many samples it was split into; all of them get its advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rollbook.train.algorithms.rollouts import Floats, Ints, Others


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """M trajectories in G groups.

    Attributes:
        rewards: float64 [M]; groups: int64 [M], the group of each.
        of_sample: int64 [N], the trajectory of each sample.
        sizes: float64 [G], trajectories of each group; sums: float64 [G], of their rewards.
    """

    rewards: Floats
    groups: Ints
    of_sample: Ints
    sizes: Floats
    sums: Floats

    def for_samples(self, values: Floats) -> Floats:
        """Values of trajectories [M] for the samples of each, [N]."""
        return values if len(values) == len(self.of_sample) else values[self.of_sample]

    def for_members(self, values: Floats) -> Floats:
        """Values of groups [G] for the members of each, [M]; or [1], where all groups have the same."""
        return values[:1] if (values == values[:1]).all() else values[self.groups]


def grouped(rewards: Floats, groups: Ints, trajectories: Ints) -> Grouped:
    """The trajectories of N samples, in the order of their first samples; groups keep their order.

    Args:
        rewards: float64 [N]; samples of one trajectory have the same.
        groups, trajectories: int64 [N], numbers from 0; a trajectory of two groups counts in both.
    """
    if (trajectories[1:] > trajectories[:-1]).all():  # each has one sample
        return _members(rewards, groups, np.arange(len(groups)))
    first = _first(trajectories)
    if (groups[first] != groups).any():
        key = groups * (trajectories.max() + 1) + trajectories
        first = _first(np.unique(key, return_inverse=True)[1])
    is_first = first == np.arange(len(first))
    number = np.cumsum(is_first) - 1
    return _members(rewards[is_first], groups[is_first], number[first])


def _first(codes: Ints) -> Ints:
    """Where each number comes first, [N]."""
    at = np.empty(codes.max() + 1, np.int64)
    at[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of equal ones the last to be written stays
    return at[codes]


def with_others(of: Grouped, others: Others | None) -> Grouped:
    """The trajectories of samples, and after them those that are only compared with."""
    if others is None:
        return of
    groups = of.groups[of.of_sample[others.beside]]
    return _members(
        np.concatenate([of.rewards, others.rewards]), np.concatenate([of.groups, groups]), of.of_sample
    )


def _members(rewards: Floats, groups: Ints, of_sample: Ints) -> Grouped:
    sizes = np.bincount(groups)
    if not sizes.all():  # of some group there is nobody
        groups = (np.cumsum(sizes > 0) - 1)[groups]
        sizes = sizes[sizes > 0]
    sums = np.bincount(groups, rewards).astype(np.float64, copy=False)
    return Grouped(rewards, groups, of_sample, sizes.astype(np.float64), sums)


def group_mean(of: Grouped) -> Floats:
    """r - mean of its group, [M]; 0 in a group of one. Source: GRPO, Shao et al. 2024 (arXiv:2402.03300)."""
    means = (of.sums / of.sizes)[of.groups]
    return np.subtract(of.rewards, means, out=means)


def leave_one_out(of: Grouped) -> Floats:
    """r - mean of the others of its group, [M]; 0 in a group of one.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), equation 8. It is n / (n - 1) times `group_mean`.
    A singleton has advantage 0, as in verl's `rloo_vectorized`; verl's `rloo` gives it its reward.
    """
    others = of.sums[of.groups]
    others -= of.rewards
    others /= of.for_members(np.maximum(of.sizes - 1, 1))
    found = np.subtract(of.rewards, others, out=others)
    if (of.sizes == 1).any():
        found[of.sizes[of.groups] == 1] = 0.0
    return found


def no_baseline(of: Grouped) -> Floats:
    """The reward itself, [M]. Source: REINFORCE, Williams 1992."""
    return of.rewards.copy()


BASELINES: Mapping[str, Callable[[Grouped], Floats]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}


def deviations(of: Grouped, ddof: int) -> Floats:
    """Standard deviation of each trajectory's group, [M]; 1 in a group of at most `ddof` trajectories.

    Args:
        ddof: 1 for the unbiased variance (verl, OpenRLHF, TRL), 0 for the biased one.
    """
    squares = group_mean(of)
    squares *= squares
    total = np.bincount(of.groups, squares, len(of.sizes))
    deviation = np.where(of.sizes > ddof, np.sqrt(total / np.maximum(of.sizes - ddof, 1)), 1.0)
    return deviation[of.groups]
