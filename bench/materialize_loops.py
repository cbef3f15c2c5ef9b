"""The baseline of `bench materialize` for the estimators and the recipe: loops over groups in plain
numpy.

Both sides begin with numbered groups, and give the same: advantages, or the indexes of the
samples that are kept and that each rule drops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.rollouts import Floats, Ints, Rollouts
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.drops import Drops
from rollbook.train.select.recipe import Candidates
from rollbook.train.select.sample_ref import numbered
from rollbook.train.select.sorting import sort_out

TOKENS = 4
"""Trained tokens of each sample."""
EPSILON = 1e-6
NEWEST, OLDEST_USED = 10, 1
"""The trainer's version, and the oldest of which samples are used; a tenth of them is of version 0."""
RECIPE = RecipeConfig(max_staleness=NEWEST - OLDEST_USED)
Sorted = tuple[Ints, dict[str, Ints]]
"""Indexes of what is kept, and of what each rule drops."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples of one trajectory each, the members of groups far apart.

    Attributes:
        group_names, trajectory_names: of each sample; groups: int64 [N], the same numbered.
        rewards, versions: of each sample.
        rollouts, candidates: the same, as an estimator and as a recipe take them.
    """

    group_names: list[str]
    trajectory_names: list[str]
    groups: Ints
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
        numbers, lengths = (numbered(names), numbered(ids)), np.full(count, TOKENS, np.int64)
        rollouts = Rollouts(rewards, *numbers, lengths)
        candidates = _candidates(*numbers, rewards, versions)
        return cls(names, ids, numbers[0], rewards, versions, rollouts, candidates)


def _candidates(groups: Ints, trajectories: Ints, rewards: Floats, versions: Ints) -> Candidates:
    true, tokens = np.ones(len(rewards), np.bool_), np.full(len(rewards), TOKENS, np.int64)
    none = np.zeros(len(rewards), np.int64)
    return Candidates(
        groups=groups,
        trajectories=trajectories,
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
        strangers=np.full(len(rewards), ""),
        oldest=versions,
        newest=versions,
        deciding=versions,
        exact=true,
        erased=~true,
        learnable=tokens,
        lengths=tokens,
        lowest=none,
        highest=tokens,
        misrouted=np.zeros(len(rewards), np.str_),
    )


def advantages_of(name: str, batch: Batch) -> Floats:
    """The advantages that the algorithm of that name gives for the batch, with all its defaults."""
    return ALGORITHMS[name].model_validate({"name": name}).advantages(batch.rollouts).values


def numbers_of(batch: Batch) -> tuple[Ints, Ints]:
    """The numbers of the batch's groups and trajectories, from their names."""
    return numbered(batch.group_names), numbered(batch.trajectory_names)


def sorted_out(batch: Batch) -> tuple[Ints, Drops]:
    """What the recipe keeps and drops for GRPO."""
    return sort_out(batch.candidates, RECIPE, ALGORITHMS["grpo"].model_validate({"name": "grpo"}), NEWEST)


# Loops ------------------------------------------------------------------------------------------------


def _members(batch: Batch) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for at, group in enumerate(batch.groups.tolist()):
        members.setdefault(group, []).append(at)
    return list(members.values())


def leave_one_out(batch: Batch) -> Floats:
    """r - mean of the others of its group."""
    advantages = np.empty(len(batch.rewards))
    for at in _members(batch):
        rewards = batch.rewards[at]
        advantages[at] = rewards - (rewards.sum() - rewards) / (len(at) - 1)
    return advantages


def standardized(batch: Batch) -> Floats:
    """(r - mean) / (unbiased standard deviation + epsilon) of its group."""
    advantages = np.empty(len(batch.rewards))
    for at in _members(batch):
        rewards = batch.rewards[at]
        advantages[at] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)
    return advantages


def whitened_over_the_batch(batch: Batch) -> Floats:
    """r - mean of its group, for each token; then minus the mean of all tokens, divided by their
    deviation."""
    advantages = np.empty((len(batch.rewards), TOKENS))
    for at in _members(batch):
        rewards = batch.rewards[at]
        advantages[at] = (rewards - rewards.mean())[:, None]
    flat = advantages.ravel()
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
    """The samples that are neither too old nor in a group of equal rewards, and the others by rule."""
    kept, stale, flat = list[Ints](), list[Ints](), list[Ints]()
    for at in _members(batch):
        indexes = np.array(at)
        old = batch.versions[at] < OLDEST_USED
        left = indexes[~old]
        rewards = batch.rewards[left]
        stale.append(indexes[old])
        (flat if len(left) and rewards.min() == rewards.max() else kept).append(left)
    none = np.zeros(0, np.int64)
    ordered = (np.sort(np.concatenate([none, *indices])) for indices in (kept, stale, flat))
    return next(ordered), dict(zip(("staleness", "zero_variance"), ordered, strict=True))
