"""Advantages from rewards. Pure numpy, without a loop over groups.

Steps are recorded with the bits of these sums: the numbers of a group are added in the order in which numpy
adds those of an array of one axis.
"""

from __future__ import annotations

import numpy as np

from rollbook.train.algorithms.baselines import grouped
from rollbook.train.algorithms.rollouts import Floats, Ints

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
    found = rewards_G - _added(rewards_G) / size
    deviation = np.sqrt(_added(found * found) / (size - 1))
    found /= deviation + std_epsilon
    return found


def _added(values: Floats) -> Floats:
    """The sums over the first axis, with the bits of numpy's over an array of one axis: up to 7 numbers one
    after the other, up to 128 in eight sums, which are then added in pairs, and more by halves.
    """
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
    of = grouped(rewards_N, groups_N, trajectories_N)
    rewards_M = rewards_N
    if len(of.groups) < len(rewards_N):
        rewards_M = np.empty(len(of.groups))
        rewards_M[of.of_sample] = rewards_N
    found = np.empty_like(rewards_M)
    order, sizes = _in_order(of.groups), of.sizes.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    for size in np.flatnonzero(np.bincount(sizes)).tolist():
        of_size, columns = begins[sizes == size], max(_AT_ONCE // size, 1)
        for at in range(0, len(of_size), columns):
            members = order[of_size[at : at + columns] + np.arange(size)[:, None]]
            found[members] = group_advantages(rewards_M[members], std_epsilon)
    return of.for_samples(found)


def _in_order(numbers: Ints) -> Ints:
    """Where the least numbers are, and so on, [M]; of equal ones the first comes first."""
    if np.count_nonzero(numbers[1:] < numbers[:-1]) < _FEW_RUNS:
        return np.argsort(numbers, kind="stable")
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # of 16 bits it is a radix sort
    for shift in range(16, int(numbers.max()).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order
