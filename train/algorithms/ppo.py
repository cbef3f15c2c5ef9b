"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rollbook.train.algorithms.algorithm import Need
from rollbook.train.algorithms.policy_gradient import (
    Baseline,
    Deviation,
    GroupPolicyGradient,
    GroupSize,
    Old,
    Whitening,
)
from rollbook.train.algorithms.returns import generalized_advantages, turn_advantages
from rollbook.train.algorithms.rollouts import Advantages, Floats, Rollouts

if TYPE_CHECKING:
    import torch


class Ppo(GroupPolicyGradient):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347): advantages by GAE, with a critic
    that learns the discounted return. `[critic]` holds its optimizer."""

    name: Literal["ppo"]
    """The algorithm that the other keys of the table belong to."""
    group_size: GroupSize = 1
    baseline: Baseline = "none"
    deviation: Deviation = "none"
    whitening: Whitening = "unbiased"
    old: Old = "trainer"
    gae_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of temporal differences, the lambda of GAE: 1 is the return less the value, 0 one step alone."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Values are clipped to this far from those as the rollout batch began; absent: not at all. verl has
    0.5."""

    @property
    def _own_needs(self) -> frozenset[Need]:
        """The critic's values too."""
        return super()._own_needs | {"values"}

    def of_tokens(self, rewards: Floats, rollouts: Rollouts) -> Advantages:
        """Advantages by GAE, whitened; the critic's targets are the advantages before that plus the
        values."""
        assert rollouts.values is not None
        values = rollouts.values.astype(float)
        if self.discount_unit == "turn":
            advantages = turn_advantages(rewards, values, rollouts, self.discount, self.gae_decay)
        else:
            advantages = generalized_advantages(
                rewards, values, rollouts.lengths, self.discount, self.gae_decay
            )
        return Advantages(self.whitened(advantages), per_token=True, returns=advantages + values)

    def value_loss(
        self, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor
    ) -> torch.Tensor:
        """Half the square of the error, or of that of the clipped value if it is greater, [B, T - 1].

        Source: the implementation of PPO (openai/baselines, ppo2), as in verl and OpenRLHF.
        """
        error = (values - returns).square()
        if self.value_clip is not None:
            near = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
            error = error.maximum((near - returns).square())
        return error / 2
