"""Group reward-decoupled normalization: rewards of several sources, each normalized by itself."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import model_validator

from rollbook.train.algorithms.advantages import among, grouped
from rollbook.train.algorithms.algorithm import Need
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.rollouts import Floats, Rollouts

OF_THE_SUM = {
    "turn_rewards": False,
    "reward_clip": None,
    "truncated_reward": None,
    "overlong_length": None,
    "reward_normalization": "none",
    "reward_kl_order": "after_baseline",
}
"""Keys that change the whole reward before it is compared, and what each is where it does not."""


class Gdpo(GroupPolicyGradient):
    """Group reward-decoupled normalization policy optimization (NVIDIA 2026, arXiv:2601.05242): the
    rewards of each source in `recipe.reward_weights` are normalized within their group, then weighted,
    summed, and normalized over the rollout batch."""

    name: Literal["gdpo"]
    """The algorithm that the other keys of the table belong to."""
    batch_normalization: Literal["unbiased", "none"] = "unbiased"
    """Whether these sums get mean 0 and deviation 1 (over n - 1) over the trajectories of a rollout batch, or
    stay as they are, so that they grow with the number of sources."""

    @model_validator(mode="after")
    def _of_sources(self) -> Gdpo:
        for key, off in OF_THE_SUM.items():
            if getattr(self, key) != off:
                raise ValueError(
                    f"{key} changes a trajectory's whole reward, and gdpo takes those of its sources apart: "
                    "leave it out, and record what it is about as a source of its own"
                )
        return self

    @property
    def _own_needs(self) -> frozenset[Need]:
        """What each source gave, too."""
        return super()._own_needs | {"reward_sources"}

    def scores(self, rewards: Floats, rollouts: Rollouts) -> Floats:
        """The score of each sample's trajectory, [N]; each trajectory counts once.

        Members of a group that a source gave nothing are no part of that source's mean and deviation, and
        have nothing of it in their sum. Source: GDPO (arXiv:2601.05242), there with a reward of every source.
        `std_epsilon` is added to all deviations, as in TRL.
        """
        assert rollouts.reward_parts is not None
        assert rollouts.reward_weights is not None
        members = grouped(np.asarray(rewards, np.float64), rollouts.groups, rollouts.trajectories)
        sums = np.zeros(len(members.rewards))
        for part, weight in zip(rollouts.reward_parts.T, rollouts.reward_weights.tolist(), strict=True):
            own = grouped(np.ascontiguousarray(part), rollouts.groups, rollouts.trajectories)
            there = ~np.isnan(own.rewards)
            if there.any():
                sums[there] += weight * self._compared(among(own, there))
        return members.for_samples(self._over_batch(sums))

    def _over_batch(self, sums: Floats) -> Floats:
        """The sums of M trajectories, [M], as the key `batch_normalization` says."""
        if self.batch_normalization == "none":
            return sums
        deviation = sums.std(ddof=1) if len(sums) > 1 else 0.0
        return np.asarray((sums - sums.mean()) / (deviation + self.std_epsilon), np.float64)
