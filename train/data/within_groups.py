"""Which samples of a prompt group are used: the best, all that differ, or the best and the worst. Pure.

Everything runs on columns. Groups and trajectories are compared by name; a sample without a group is, where
samples are ranked, a group of its trajectory alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Names = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Of N samples the group, or None, the trajectory, and its reward; every array is [N]."""

    groups: Names
    trajectories: Names
    rewards: npt.NDArray[np.float64]


def below_top(of: Members, left: Bools, fraction: float) -> Bools:
    """Which of those that are left are not of their group's best trajectories; of equal rewards the first
    count."""
    at = np.flatnonzero(left)
    groups = _of_each(of, at)
    trajectories = codes_of(of.trajectories[at])
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
    first = np.unique(codes_of(of.trajectories[at]), return_index=True)[1]
    counts = np.zeros(len(left), np.int64)
    counts[at] = np.bincount(groups[first], minlength=int(groups.max(initial=0)) + 1)[groups]
    return counts


def flat(of: Members, left: Bools, compared: Bools) -> Bools:
    """Which of those that are left are in groups whose rewards are all equal.

    Args:
        compared: those whose rewards count; all that are left are among them.
    """
    at = np.flatnonzero(compared)
    groups, rewards = codes_of(of.groups[at]), of.rewards[at]
    order = np.argsort(groups, kind="stable")
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    if not len(begins):
        return np.zeros_like(left)
    least, greatest = (extreme.reduceat(rewards[order], begins) for extreme in (np.minimum, np.maximum))
    equal = left.copy()
    equal[at] = (least == greatest)[groups]
    return equal & left


def codes_of(values: npt.NDArray[np.object_]) -> Ints:
    """A number from 0 for each distinct text, in the order of first occurrence; None is a text too."""
    encoded = pa.array(values, pa.string()).dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices.to_numpy(), np.int64)


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


def in_several(trajectories: Names) -> Bools:
    """Whether a sample's trajectory has several samples, [N]."""
    codes = codes_of(trajectories)
    return (np.bincount(codes) > 1)[codes] if len(codes) else np.zeros(0, np.bool_)


def _of_each(of: Members, at: Ints) -> Ints:
    """A number for the group of each sample, or for its trajectory where it has none."""
    alone = np.array([group is None for group in of.groups[at]], np.bool_)
    return codes_of(np.where(alone, of.trajectories[at], of.groups[at])) * 2 + alone
