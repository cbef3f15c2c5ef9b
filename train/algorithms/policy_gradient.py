"""Policy gradients without a critic: a baseline, a surrogate and a normalizer, and named combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from rollbook.train.algorithms.advantages import Floats
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.baselines import BASELINES, deviations, grouped
from rollbook.train.algorithms.normalizers import NORMALIZERS, Totals
from rollbook.train.algorithms.surrogates import SURROGATES, Clips
from rollbook.train.table import Positive

if TYPE_CHECKING:
    import torch


def _key(description: str) -> object:
    return Field(description=description)


Baseline = Annotated[
    Literal["group_mean", "leave_one_out", "none"],
    _key("Subtracted from a reward: its group's mean, the mean of the others of its group, or nothing."),
]
Deviation = Annotated[
    Literal["unbiased", "biased", "none"],
    _key(
        "The group's standard deviation, by which advantages are divided: over n - 1, over n, or not at all."
    ),
]
Surrogate = Annotated[
    Literal["ppo_clip", "gspo", "cispo", "reinforce"],
    _key(
        "The loss of a token: PPO's, with the ratio of each token or (`gspo`) of its sample; CISPO's; or "
        "minus advantage times logprob."
    ),
]
ClipLow = Annotated[float, Field(ge=0), _key("Lower clip: ratios are clipped at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(ge=0), _key("Upper clip: ratios are clipped at 1 + clip_high.")]
Normalization = Annotated[
    Literal["token_mean", "sequence_mean", "sequence_sum", "constant"],
    _key(
        "The mean over the batch's tokens; the mean over samples of the mean, or of the sum, over a sample's "
        "tokens; or the sum over all tokens, divided by samples times `constant_length`."
    ),
]


class GroupPolicyGradient(Algorithm):
    """The keys that all combinations have, and what they mean."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "rewards", "groups"})

    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories per group; a group is used once it has this many."""
    groups: Positive = 16
    """Groups per step."""
    baseline: Baseline = "group_mean"
    deviation: Deviation = "unbiased"
    std_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation. verl has 1e-6, OpenRLHF 1e-9, TRL 1e-4."""
    surrogate: Surrogate = "ppo_clip"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The loss of a token of negative advantage is at most this many times minus the advantage; absent: it is
    not bounded. verl's default is 3."""
    normalizer: Normalization = "token_mean"
    constant_length: Positive = 1024
    """With the normalizer `constant`: tokens by which the sum of each sample is divided."""

    @property
    def demand(self) -> Demand:
        """A step uses `groups` groups of `group_size` trajectories."""
        return Demand(self.groups, self.group_size)

    def advantages(self, rewards: Floats, groups: Sequence[str], trajectories: Sequence[str]) -> Floats:
        """Reward less baseline, divided by the group's deviation, of each trajectory; [N], of each sample."""
        of = grouped(np.asarray(rewards, np.float64), groups, trajectories)
        advantages = BASELINES[self.baseline](of)
        if self.deviation != "none":
            advantages = advantages / (deviations(of, int(self.deviation == "unbiased")) + self.std_epsilon)
        return advantages[of.of_sample]

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """The surrogate of each token."""
        return SURROGATES[self.surrogate](inputs, Clips(self.clip_low, self.clip_high, self.dual_clip))

    def add(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum that the normalizer takes."""
        return NORMALIZERS[self.normalizer].add(losses, mask)

    def divisor(self, totals: Totals) -> int:
        """The number that the normalizer divides by."""
        return NORMALIZERS[self.normalizer].divisor(totals, self.constant_length)


class PolicyGradient(GroupPolicyGradient):
    """A policy gradient over groups, without a critic, composed by its keys; all defaults are `grpo`."""

    name: Literal["policy_gradient"]
    """The algorithm that the other keys of the table belong to."""


class Rloo(GroupPolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740), with PPO's clip."""

    name: Literal["rloo"]
    """The algorithm that the other keys of the table belong to."""
    baseline: Baseline = "leave_one_out"
    deviation: Deviation = "none"


class DrGrpo(GroupPolicyGradient):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): no deviation, one length for all samples."""

    name: Literal["dr_grpo"]
    """The algorithm that the other keys of the table belong to."""
    deviation: Deviation = "none"
    normalizer: Normalization = "constant"


class Dapo(GroupPolicyGradient):
    """The loss of DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with a higher upper clip."""

    name: Literal["dapo"]
    """The algorithm that the other keys of the table belong to."""
    clip_high: ClipHigh = 0.28


class Gspo(GroupPolicyGradient):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071), with the paper's clips."""

    name: Literal["gspo"]
    """The algorithm that the other keys of the table belong to."""
    surrogate: Surrogate = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    normalizer: Normalization = "sequence_mean"


class Cispo(GroupPolicyGradient):
    """CISPO of MiniMax-M1 (Chen et al. 2025, arXiv:2506.13585): weights are clipped from above only."""

    name: Literal["cispo"]
    """The algorithm that the other keys of the table belong to."""
    surrogate: Surrogate = "cispo"
    clip_low: ClipLow = 1.0
