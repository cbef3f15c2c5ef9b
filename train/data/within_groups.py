"""Which samples of a prompt group are used: the best, all that differ, or the best and the worst. Pure.

Everything runs on columns. A sample without a group is, where samples are ranked, a group of its trajectory
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.train.data.numbering import NO_GROUP

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_AT_ONCE = 1 << 15
"""Samples that are compared together: their columns stay in a core's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Of N samples the group's number, or `NO_GROUP`, the trajectory's, and the reward; arrays are [N]."""

    groups: Ints
    trajectories: Ints
    rewards: npt.NDArray[np.float64]


def below_top(of: Members, left: Bools, fraction: float) -> Bools:
    """Which of those that are left are not of their group's best trajectories; of equal rewards the first
    count."""
    at = np.flatnonzero(left)
    groups, trajectories = _of_each(of, at), of.trajectories[at]
    first = np.unique(trajectories, return_index=True)[1]
    order = first[np.lexsort((first, -of.rewards[at][first], groups[first]))]
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    rank = np.arange(len(order)) - np.repeat(begins, sizes)
    best = rank < np.repeat(np.maximum(np.ceil(fraction * sizes - 1e-9), 1), sizes)
    below = left.copy()
    below[at] = np.isin(trajectories, trajectories[order[best]], invert=True)
    return below


def members_left(of: Members, left: Bools) -> Ints:
    """How many trajectories of its group are left, of each sample that is; [N]."""
    at = np.flatnonzero(left)
    groups = _of_each(of, at)
    first = np.unique(of.trajectories[at], return_index=True)[1]
    counts = np.zeros(len(left), np.int64)
    counts[at] = np.bincount(groups[first], minlength=int(groups.max(initial=0)) + 1)[groups]
    return counts


def flat(of: Members, left: Bools, compared: Bools) -> Bools:
    """Which of those that are left are in groups whose rewards are all equal; those without a group are one.

    All rewards of a group are equal if each is equal to one of them, whichever that is.

    Args:
        compared: those whose rewards count; all that are left are among them.
    """
    count = int(of.groups.max(initial=NO_GROUP)) + 2  # the last is NO_GROUP's, which is -1
    one, differ, equal = np.empty(count), np.zeros(count, np.bool_), np.empty_like(left)
    pieces = [slice(at, at + _AT_ONCE) for at in range(0, len(left), _AT_ONCE)]
    for piece in pieces:
        at = np.flatnonzero(compared[piece])
        one[of.groups[piece][at]] = of.rewards[piece][at]
    for piece in pieces:
        unequal = (of.rewards[piece] != one[of.groups[piece]]) & compared[piece]
        differ[of.groups[piece][np.flatnonzero(unequal)]] = True
    for piece in pieces:
        equal[piece] = left[piece] & ~differ[of.groups[piece]]
    return equal


def best_and_worst(of: Members, left: Bools) -> Ints:
    """Of each group the sample of the greatest reward and that of the least, [P, 2], groups in the order of
    their first sample.

    Of equal rewards the first counts. Groups of one trajectory, and groups whose rewards are all equal, have
    no pair.
    """
    at = np.flatnonzero(left)
    groups, rewards = _of_each(of, at), of.rewards[at]
    if not len(at):
        return np.zeros((0, 2), np.int64)
    ranked = np.lexsort((np.arange(len(at)), -rewards, groups))
    rising = np.lexsort((np.arange(len(at)), rewards, groups))
    begins = np.flatnonzero(np.diff(groups[ranked], prepend=-1))
    best, worst = ranked[begins], rising[begins]
    differ = rewards[best] > rewards[worst]
    pairs = np.stack([at[best], at[worst]], axis=1)[differ]
    first = np.minimum.reduceat(ranked, begins)[differ]
    return pairs[np.argsort(first)]


def in_several(trajectories: Ints) -> Bools:
    """Whether a sample's trajectory has several samples, [N]."""
    return np.asarray(np.bincount(trajectories)[trajectories] > 1, np.bool_)


def _of_each(of: Members, at: Ints) -> Ints:
    """A number for the group of each sample, or for its trajectory where it has none."""
    groups = of.groups[at]
    alone = groups.max(initial=NO_GROUP) + 1 + of.trajectories[at]
    return np.asarray(np.where(groups == NO_GROUP, alone, groups), np.int64)
