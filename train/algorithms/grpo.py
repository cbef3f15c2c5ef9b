"""Group-relative policy optimization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rollbook.train.algorithms.advantages import Floats, trajectory_advantages
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.table import Positive

if TYPE_CHECKING:
    import torch


class Grpo(Algorithm):
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300), averaged as in DAPO.

    The loss is the mean over the batch's trained tokens (Yu et al. 2025, arXiv:2503.14476), not the mean of
    each sample's mean. Advantages are divided by the group's unbiased standard deviation. There is no dual
    clip, no KL term and no critic.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "rewards", "groups"})

    name: Literal["grpo"]
    """The algorithm that the other keys of the table belong to."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories per group; a group is used once it has this many."""
    groups: Positive = 16
    """Groups per step."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip: the probability ratio of the policy in training to the sampling policy is clipped at 1 -
    clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip: the probability ratio of the policy in training to the sampling policy is clipped at
    1 + clip_high."""
    std_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the group's standard deviation before advantages are divided by it."""

    @property
    def demand(self) -> Demand:
        """A step uses `groups` groups of `group_size` trajectories."""
        return Demand(self.groups, self.group_size)

    def advantages(self, rewards: Floats, groups: Sequence[str], trajectories: Sequence[str]) -> Floats:
        """Group-relative: (reward - mean) / (standard deviation + std_epsilon), within each group."""
        return trajectory_advantages(rewards, groups, trajectories, self.std_epsilon)

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """Clipped surrogate, -min(r A, clip(r, 1 - l, 1 + h) A), r = exp(logprob - old logprob).

        Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the advantages of GRPO,
        Shao et al. 2024 (arXiv:2402.03300). The old logprobs are those the engine sampled with.
        """
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -(ratio * inputs.advantages).minimum(clipped * inputs.advantages)
