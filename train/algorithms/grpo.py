"""Group-relative policy optimization."""

from __future__ import annotations

from typing import Literal

from rollbook.train.algorithms.advantages import trajectory_advantages
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.rollouts import Floats, Rollouts


class Grpo(GroupPolicyGradient):
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300), averaged as in DAPO.

    The loss is the mean over the batch's trained tokens (Yu et al. 2025, arXiv:2503.14476), not the mean of
    each sample's mean. Advantages are divided by the group's unbiased standard deviation.
    """

    name: Literal["grpo"]
    """The algorithm that the other keys of the table belong to."""

    def scores(self, rewards: Floats, of: Rollouts) -> Floats:
        """As any combination's; of its own baseline and deviation with the bits that the first release
        had."""
        own = (self.baseline, self.deviation, self.group_of_one)
        if own != ("group_mean", "unbiased", "zero") or of.others is not None:
            return super().scores(rewards, of)
        return trajectory_advantages(rewards, of.groups, of.trajectories, self.std_epsilon)
