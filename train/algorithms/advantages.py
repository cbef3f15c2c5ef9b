"""Advantages of trajectories from their rewards: rewards are shaped, then compared with a baseline
of their group. Pure numpy, without a loop over groups.

A trajectory counts once in its group, however many samples it was split into; all of them get
its advantage. Recorded steps depend on the exact bits of these sums, so the numbers of a group
are added in the order in which numpy sums a one-dimensional array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.train.algorithms.rollouts import Floats, GroupPeers, Ints

_AT_ONCE = 1 << 15
"""Trajectories whose advantages are computed together: they stay in a core's cache."""
_FEW_RUNS = 1 << 10
"""Numbers that rise in so many runs are sorted by merging them, others digit by digit."""


def group_advantages(rewards_G: Floats, std_epsilon: float) -> Floats:
    """Group-relative advantages, (r - mean) / (std + epsilon), of one group's G trajectories; or of K groups
    of one size, [G, K], each a column.

    The standard deviation is the unbiased one; a group of one has advantage 0. Source: GRPO, Shao et
    al. 2024 (arXiv:2402.03300), outcome supervision.
    """
    size = len(rewards_G)
    if size < 2:
        return np.zeros_like(rewards_G)
    advantages = rewards_G - _added(rewards_G) / size
    deviation = np.sqrt(_added(advantages * advantages) / (size - 1))
    advantages /= deviation + std_epsilon
    return advantages


def _added(values: Floats) -> Floats:
    """The sums over the first axis, with the same bits as numpy's sum of a one-dimensional array:
    up to 7 numbers one after the other, up to 128 in eight sums, which are then added in pairs,
    and more by halves."""
    count = len(values)
    if count > 128:
        return np.asarray(np.ascontiguousarray(values.T).sum(axis=-1))
    whole, sums = count - count % 8, np.zeros(values.shape[1:])
    if whole:
        eight = values[:8]
        for at in range(8, whole, 8):
            eight = eight + values[at : at + 8]
        four = eight[0::2] + eight[1::2]
        sums += (four[0] + four[1]) + (four[2] + four[3])
    for rest in values[whole:]:
        sums += rest
    return sums


def trajectory_advantages(
    rewards_N: Floats, groups_N: Ints, trajectories_N: Ints, std_epsilon: float
) -> Floats:
    """Advantage of each of N samples within its group.

    A trajectory counts once in its group, however many samples it was split into; all of its samples
    get its advantage.

    Args:
        groups_N, trajectories_N: numbers from 0.
    """
    grouping = grouped(rewards_N, groups_N, trajectories_N)
    rewards_M = rewards_N
    if len(grouping.groups) < len(rewards_N):
        rewards_M = np.empty(len(grouping.groups))
        rewards_M[grouping.of_sample] = rewards_N
    advantages_M = np.empty_like(rewards_M)
    order, sizes = _in_order(grouping.groups), grouping.sizes.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    for size in np.flatnonzero(np.bincount(sizes)).tolist():
        of_size, columns = begins[sizes == size], max(_AT_ONCE // size, 1)
        for at in range(0, len(of_size), columns):
            members = order[of_size[at : at + columns] + np.arange(size)[:, None]]
            advantages_M[members] = group_advantages(rewards_M[members], std_epsilon)
    return grouping.for_samples(advantages_M)


def _in_order(numbers: Ints) -> Ints:
    """The indexes that sort the numbers in ascending order, [M]; equal numbers keep their order."""
    if np.count_nonzero(numbers[1:] < numbers[:-1]) < _FEW_RUNS:
        return np.argsort(numbers, kind="stable")
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # of 16 bits it is a radix sort
    for shift in range(16, int(numbers.max()).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


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
        """Values of trajectories [M], repeated for the samples of each, [N]."""
        return values if len(values) == len(self.of_sample) else values[self.of_sample]

    def for_members(self, values: Floats) -> Floats:
        """Values of groups [G], repeated for the members of each, [M]; or [1], where all groups
        have the same."""
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
    """The index at which each distinct number first occurs, [N]."""
    at = np.empty(codes.max() + 1, np.int64)
    at[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of equal ones the last to be written stays
    return at[codes]


def with_others(members: Grouped, others: GroupPeers | None) -> Grouped:
    """The trajectories of samples, followed by those that are only compared with."""
    if others is None:
        return members
    groups = members.groups[members.of_sample[others.beside]]
    return _members(
        np.concatenate([members.rewards, others.rewards]),
        np.concatenate([members.groups, groups]),
        members.of_sample,
    )


def _members(rewards: Floats, groups: Ints, of_sample: Ints) -> Grouped:
    sizes = np.bincount(groups)
    if not sizes.all():  # of some group there is nobody
        groups = (np.cumsum(sizes > 0) - 1)[groups]
        sizes = sizes[sizes > 0]
    sums = np.bincount(groups, rewards).astype(np.float64, copy=False)
    return Grouped(rewards, groups, of_sample, sizes.astype(np.float64), sums)


def group_mean(members: Grouped) -> Floats:
    """r - mean of its group, [M]; 0 in a group of one. Source: GRPO, Shao et al. 2024 (arXiv:2402.03300)."""
    means = (members.sums / members.sizes)[members.groups]
    return np.subtract(members.rewards, means, out=means)


def leave_one_out(members: Grouped) -> Floats:
    """r - mean of the others of its group, [M]; 0 in a group of one.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), equation 8. It is n / (n - 1) times `group_mean`.
    A singleton has advantage 0, as in verl's `rloo_vectorized`; verl's `rloo` gives it its reward.
    """
    others = members.sums[members.groups]
    others -= members.rewards
    others /= members.for_members(np.maximum(members.sizes - 1, 1))
    advantages = np.subtract(members.rewards, others, out=others)
    if (members.sizes == 1).any():
        advantages[members.sizes[members.groups] == 1] = 0.0
    return advantages


def no_baseline(members: Grouped) -> Floats:
    """The reward itself, [M]. Source: REINFORCE, Williams 1992."""
    return members.rewards.copy()


BASELINES: Mapping[str, Callable[[Grouped], Floats]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}


def deviations(members: Grouped, ddof: int) -> Floats:
    """Standard deviation of each trajectory's group, [M]; 1 in a group of at most `ddof` trajectories.

    Args:
        ddof: 1 for the unbiased variance (verl, OpenRLHF, TRL), 0 for the biased one.
    """
    squares = group_mean(members)
    squares *= squares
    total = np.bincount(members.groups, squares, len(members.sizes))
    deviation = np.where(members.sizes > ddof, np.sqrt(total / np.maximum(members.sizes - ddof, 1)), 1.0)
    return deviation[members.groups]


def overlong_penalty(lengths: Ints, longest: int, buffer: int) -> Floats:
    """From 0 to -1 over the last `buffer` tokens before `longest`, and -1 beyond, [M].

    Source: soft overlong punishment of DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13.

    Args:
        lengths: trained tokens of each trajectory.
    """
    return -((lengths - (longest - buffer)) / buffer).clip(0, 1)


def stopped_properly(rewards: Floats, truncated: npt.NDArray[np.bool_], coefficient: float) -> Floats:
    """Rewards of truncated trajectories times a coefficient; one below 0 takes their place, [M].

    Source: the stop-properly penalty of ProRL, Liu et al. 2025 (arXiv:2505.24864), as in OpenRLHF and NeMo
        RL.
    """
    return np.where(truncated, coefficient if coefficient < 0 else rewards * coefficient, rewards)
