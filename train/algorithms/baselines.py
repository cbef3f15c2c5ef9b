"""Baselines: advantages of trajectories from the rewards of their groups. Pure, without a loop over groups.

A trajectory counts once in its group, however many samples it was split into; all of them get its advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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


def grouped(rewards: Floats, groups: Sequence[str], trajectories: Sequence[str]) -> Grouped:
    """Number the groups and trajectories of N samples, in the order of their first samples.

    Args:
        rewards: float64 [N]; samples of one trajectory have the same.
    """
    group, trajectory = _codes(groups), _codes(trajectories)
    if trajectory.max(initial=-1) == len(trajectory) - 1:  # each has one sample
        return _members(rewards, group, np.arange(len(group)))
    key = group * (trajectory.max(initial=0) + 1) + trajectory
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return _members(rewards[first[order]], group[first[order]], number[inverse])


def with_others(of: Grouped, others: Others | None) -> Grouped:
    """The trajectories of samples, and after them those that are only compared with."""
    if others is None:
        return of
    groups = of.groups[of.of_sample[others.beside]]
    return _members(
        np.concatenate([of.rewards, others.rewards]), np.concatenate([of.groups, groups]), of.of_sample
    )


def _members(rewards: Floats, groups: Ints, of_sample: Ints) -> Grouped:
    count = int(groups.max(initial=-1)) + 1
    sizes = np.bincount(groups, minlength=count).astype(np.float64)
    sums = np.bincount(groups, rewards, count).astype(np.float64)
    return Grouped(rewards, groups, of_sample, sizes, sums)


def _codes(names: Sequence[str]) -> Ints:
    """A number from 0 for each distinct name, in the order of first occurrence."""
    encoded = pa.array(names, pa.string()).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(), np.int64)


def group_mean(of: Grouped) -> Floats:
    """r - mean of its group, [M]; 0 in a group of one. Source: GRPO, Shao et al. 2024 (arXiv:2402.03300)."""
    return of.rewards - (of.sums / of.sizes)[of.groups]


def leave_one_out(of: Grouped) -> Floats:
    """r - mean of the others of its group, [M]; 0 in a group of one.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), equation 8. It is n / (n - 1) times `group_mean`.
    A singleton has advantage 0, as in verl's `rloo_vectorized`; verl's `rloo` gives it its reward.
    """
    sizes = of.sizes[of.groups]
    others = (of.sums[of.groups] - of.rewards) / np.maximum(sizes - 1, 1)
    return np.where(sizes > 1, of.rewards - others, 0.0)


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
    squares = (of.rewards - (of.sums / of.sizes)[of.groups]) ** 2
    total = np.bincount(of.groups, squares, len(of.sizes))
    deviation = np.where(of.sizes > ddof, np.sqrt(total / np.maximum(of.sizes - ddof, 1)), 1.0)
    return deviation[of.groups]
