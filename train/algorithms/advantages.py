"""Advantages from rewards. Pure numpy, without a loop over groups.

Steps are recorded with the bits of these sums: along the last axis numpy adds the numbers of a group in the
order in which it adds those of an array of one axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollbook.train.algorithms.baselines import grouped
from rollbook.train.algorithms.rollouts import Floats


def group_advantages(rewards_G: Floats, std_epsilon: float) -> Floats:
    """Group-relative advantages, (r - mean) / (std + epsilon), of one group's G trajectories; or of K groups
    of one size, [K, G], in rows that lie one after the other.

    The standard deviation is the unbiased one; a group of one has advantage 0. Source: GRPO, Shao et
    al. 2024 (arXiv:2402.03300), outcome supervision.
    """
    if rewards_G.shape[-1] < 2:
        return np.zeros_like(rewards_G)
    mean = rewards_G.mean(axis=-1, keepdims=True)
    return (rewards_G - mean) / (rewards_G.std(axis=-1, ddof=1, keepdims=True) + std_epsilon)


def trajectory_advantages(
    rewards_N: Floats, groups_N: Sequence[str], trajectories_N: Sequence[str], std_epsilon: float
) -> Floats:
    """Advantage of each of N samples within its group.

    A trajectory counts once in its group, however many samples it was split into; all of its samples
    get its advantage.
    """
    of = grouped(rewards_N, groups_N, trajectories_N)
    rewards_M = np.empty(len(of.groups))
    rewards_M[of.of_sample] = rewards_N
    found = np.empty_like(rewards_M)
    order, sizes = np.argsort(of.groups, kind="stable"), of.sizes.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    for size in np.unique(sizes):
        members = order[begins[sizes == size][:, None] + np.arange(size)]
        found[members] = group_advantages(rewards_M[members], std_epsilon)
    return found[of.of_sample]
