"""Named combinations of the parts of a policy gradient. Each key may still be set."""

from __future__ import annotations

from typing import Literal

from rollbook.train.algorithms.keys import (
    Baseline,
    ClipHigh,
    ClipLow,
    Correction,
    CorrectionHigh,
    Deviation,
    GroupSize,
    Normalization,
    Old,
    Surrogate,
    Whitening,
)
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient


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


class ReinforcePlusPlus(GroupPolicyGradient):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): no groups; advantages are whitened over the rollout batch."""

    name: Literal["reinforce_plus_plus"]
    """The algorithm that the other keys of the table belong to."""
    group_size: GroupSize = 1
    baseline: Baseline = "none"
    deviation: Deviation = "none"
    whitening: Whitening = "unbiased"


class ReinforcePlusPlusBaseline(GroupPolicyGradient):
    """REINFORCE++-baseline (arXiv:2501.03262): rewards less their group's mean, whitened over the batch."""

    name: Literal["reinforce_plus_plus_baseline"]
    """The algorithm that the other keys of the table belong to."""
    deviation: Deviation = "none"
    whitening: Whitening = "unbiased"


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


class DecoupledPpo(GroupPolicyGradient):
    """Decoupled PPO without a critic (AReaL, Fu et al. 2025, arXiv:2505.24298), equation 5: ratios are taken
    to the trainer's policy as the batch begins, and tokens weighted by its ratio to the engine's, up to 5."""

    name: Literal["decoupled_ppo"]
    """The algorithm that the other keys of the table belong to."""
    old: Old = "trainer"
    correction: Correction = "tis"
    correction_high: CorrectionHigh = 5.0
