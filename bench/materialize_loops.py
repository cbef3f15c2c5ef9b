"""What `bench materialize` holds the estimators and the recipe against: loops over groups in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rollbook.store.events import Json
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.rollouts import Floats, Ints, Rollouts
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.data.recipe import Candidates
from rollbook.train.data.sorting import sort_out

TOKENS = 4
"""Trained tokens of each sample."""
EPSILON = 1e-6
NEWEST, OLDEST_USED = 10, 1
"""The trainer's version, and the oldest of which samples are used; a tenth of them is of version 0."""
RECIPE = RecipeConfig(max_staleness=NEWEST - OLDEST_USED)
Sorted = tuple[Ints, list[tuple[int, str, Json]]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples of one trajectory each, the members of groups far apart.

    Attributes:
        groups, trajectories: names of each sample's; rewards, versions: of each sample.
        rollouts, candidates: the same, as an estimator and as a recipe take them.
    """

    groups: list[str]
    trajectories: list[str]
    rewards: Floats
    versions: Ints
    rollouts: Rollouts
    candidates: Candidates

    @classmethod
    def of(cls, groups: int, size: int, seed: int = 0) -> Batch:
        """So many groups of one size, each 16th of them of equal rewards."""
        rng = np.random.default_rng(seed)
        count = groups * size
        group = np.tile(np.arange(groups), size)
        rewards = np.where(group % 16 == 7, 0.5, rng.integers(0, 11, count) / 10)
        versions = rng.integers(0, NEWEST, count)
        names = [f"group-{number}" for number in group.tolist()]
        ids = [f"{number:032x}" for number in rng.permutation(count).tolist()]
        lengths = np.full(count, TOKENS, np.int64)
        rollouts = Rollouts(rewards, names, ids, lengths)
        return cls(names, ids, rewards, versions, rollouts, _candidates(names, ids, rewards, versions))


def _candidates(groups: list[str], ids: list[str], rewards: Floats, versions: Ints) -> Candidates:
    true, tokens = np.ones(len(rewards), np.bool_), np.full(len(rewards), TOKENS, np.int64)
    none = np.zeros(len(rewards), np.int64)
    return Candidates(
        groups=np.array(groups, np.object_),
        trajectories=np.array(ids, np.object_),
        succeeded=true,
        failed=~true,
        status=none,
        preferred=true,
        infinite=~true,
        turn_rewards=np.zeros(len(rewards)),
        chosen=true,
        rewards=rewards,
        rewarded=true,
        unknown=none,
        oldest=versions,
        deciding=versions,
        exact=true,
        erased=~true,
        learnable=tokens,
        lengths=tokens,
        lowest=none,
        highest=tokens,
    )


def advantages_of(name: str, batch: Batch) -> Floats:
    """What the algorithm of that name makes of the batch, with all its defaults."""
    return ALGORITHMS[name].model_validate({"name": name}).advantages(batch.rollouts).values


def sorted_out(batch: Batch) -> Sorted:
    """What the recipe keeps and drops for GRPO."""
    return sort_out(batch.candidates, RECIPE, ALGORITHMS["grpo"].model_validate({"name": "grpo"}), NEWEST)


# Loops ------------------------------------------------------------------------------------------------


def _members(batch: Batch) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for at, group in enumerate(batch.groups):
        members.setdefault(group, []).append(at)
    return list(members.values())


def leave_one_out(batch: Batch) -> Floats:
    """r - mean of the others of its group."""
    found = np.empty(len(batch.rewards))
    for at in _members(batch):
        rewards = batch.rewards[at]
        found[at] = rewards - (rewards.sum() - rewards) / (len(at) - 1)
    return found


def standardized(batch: Batch) -> Floats:
    """(r - mean) / (unbiased standard deviation + epsilon) of its group."""
    found = np.empty(len(batch.rewards))
    for at in _members(batch):
        rewards = batch.rewards[at]
        found[at] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)
    return found


def whitened_over_the_batch(batch: Batch) -> Floats:
    """r - mean of its group, for each token; then less the mean of all tokens, over their deviation."""
    found = np.empty((len(batch.rewards), TOKENS))
    for at in _members(batch):
        rewards = batch.rewards[at]
        found[at] = (rewards - rewards.mean())[:, None]
    flat = found.ravel()
    scaled: Floats = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    return scaled


LOOPS: Mapping[str, Callable[[Batch], Floats]] = {
    "rloo": leave_one_out,
    "grpo": standardized,
    "reinforce_plus_plus_baseline": whitened_over_the_batch,
    "policy_gradient": standardized,
}
"""Algorithm -> its advantages, by a loop."""


def sort_out_by_groups(batch: Batch) -> Sorted:
    """What is neither too old nor in a group of equal rewards, and the others with rule and detail."""
    kept, drops = list[int](), list[tuple[int, str, Json]]()
    for at in _members(batch):
        indexes, ages = np.array(at), NEWEST - batch.versions[at]
        limit = NEWEST - OLDEST_USED
        for old, age in zip(indexes[ages > limit].tolist(), ages[ages > limit].tolist(), strict=True):
            drops.append((old, "staleness", {"staleness": age, "max_staleness": limit}))
        left = indexes[ages <= limit]
        rewards = batch.rewards[left]
        if len(left) and rewards.min() == rewards.max():
            drops += [(one, "zero_variance", {"reward": float(rewards[0])}) for one in left.tolist()]
        else:
            kept += left.tolist()
    return np.sort(np.array(kept, np.int64)), drops
