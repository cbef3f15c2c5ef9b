"""On-policy distillation: a policy learns from a teacher's opinion of the tokens that it sampled."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rollbook.train.algorithms.algorithm import Need
from rollbook.train.algorithms.policy_gradient import Baseline, Deviation, GroupPolicyGradient, GroupSize
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

REWARDS = (
    "turn_rewards",
    "reward_kl",
    "truncated_reward",
    "overlong_length",
    "reward_clip",
    "reward_normalization",
)
"""Keys of rewards, of which there are none."""


class Distillation(GroupPolicyGradient):
    """On-policy distillation (Lu et al. 2025, Thinking Machines): the advantage of a token is minus the
    reverse KL divergence to the teacher, estimated by that token. No rewards count; beside rewards it is
    `teacher_kl` of any other policy gradient."""

    name: Literal["distillation"]
    """The algorithm that the other keys of the table belong to."""
    group_size: GroupSize = 1
    baseline: Baseline = "none"
    deviation: Deviation = "none"
    teacher_kl: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the reverse KL divergence to the teacher (`[[teacher]]`)."""

    @model_validator(mode="after")
    def _without_rewards(self) -> Distillation:
        defaults = type(self).model_fields
        if given := [key for key in REWARDS if getattr(self, key) != defaults[key].default]:
            raise ValueError(
                f"{given[0]} is about rewards, and distillation has none: leave it out, or set teacher_kl "
                'of another policy gradient, such as name = "grpo"'
            )
        return self

    @property
    def _own_needs(self) -> frozenset[Need]:
        """No rewards."""
        return super()._own_needs - {"rewards"}

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """The teacher's part alone, [P]."""
        nothing = np.zeros(int(rollouts.lengths.sum()))
        return Advantages(self.whitened(self.taught(nothing, rollouts)), per_token=True)
