"""The keys of a policy gradient, and the types of those whose default differs in some combination.

The names that a key may have are those in its registry: a function added there becomes a legal
value, in a CONFIG and on the page of all keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rollbook.store.config import Positive
from rollbook.train.algorithms.advantages import BASELINES
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.parts import OwnPart
from rollbook.train.algorithms.surrogates import (
    KL_ESTIMATORS,
    LARGEST_LOG_RATIO,
    LARGEST_SEQUENCE_LOG_RATIO,
    SURROGATES,
    KlBound,
)


def _key(description: str) -> object:
    return Field(description=description)


def part_key(names: Iterable[str], description: str) -> Any:
    """The type of a key that names a part: one in a registry, or the user's own."""
    return Annotated[Literal[tuple(names)] | OwnPart, _key(description)]


if TYPE_CHECKING:
    Baseline = str
    Surrogate = str
    Normalization = str
    Correction = str
    KlEstimator = str
else:
    Baseline = part_key(
        BASELINES,
        "Subtracted from a reward: its group's mean, the mean of the others of its group, or nothing.",
    )
    Surrogate = part_key(
        SURROGATES,
        "The loss of a token: PPO's, with the ratio of each token or (`gspo`) of its sample; CISPO's; minus "
        "advantage times logprob; or that with DRO's quadratic term.",
    )
    Normalization = part_key(
        NORMALIZERS,
        "The mean over the batch's tokens; the mean over samples of the mean, or of the sum, over a sample's "
        "tokens; or the sum over all tokens, divided by samples times `constant_length`.",
    )
    Correction = part_key(
        ("none", *CORRECTIONS),
        'With old = "trainer": how tokens are weighted by the ratio of the trainer\'s probability to the '
        "engine's. `tis` bounds the ratio, of a token or (`sequence_tis`) of a sample; `icepop` and `mis` "
        "reject tokens or samples beyond the bounds; `sequence_mask_tis` samples by the geometric mean.",
    )
    KlEstimator = part_key(
        KL_ESTIMATORS, "How that divergence is estimated: `train/algorithms/surrogates.py`."
    )

Deviation = Annotated[
    Literal["unbiased", "biased", "none"],
    _key(
        "The group's standard deviation, by which advantages are divided: over n - 1, over n, or not at all."
    ),
]
Whitening = Annotated[
    Literal["none", "unbiased", "biased", "mean"],
    _key(
        "Advantages of all trained tokens of a rollout batch get mean 0 and variance 1 (over n - 1, as in "
        "verl, or over n, as in OpenRLHF), or mean 0 only."
    ),
]
ClipLow = Annotated[float, Field(ge=0), _key("Lower clip: ratios are clipped at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(ge=0), _key("Upper clip: ratios are clipped at 1 + clip_high.")]
Old = Annotated[
    Literal["engine", "trainer"],
    _key(
        "Which policy ratios are taken to: the engine's logprobs as recorded, or those of the trainer's "
        "weights as the rollout batch begins, computed in a forward pass (decoupled PPO, arXiv:2505.24298)."
    ),
]
CorrectionHigh = Annotated[float, Field(gt=0), _key("Upper bound of the correction's ratio.")]
Groups = Annotated[Positive, _key("Groups per rollout batch.")]
GroupSize = Annotated[
    int, Field(ge=1), _key("Trajectories per group; a group is used once it has this many.")
]
Bound = Annotated[float, Field(gt=0)] | Literal["none"]
"""A number above 0, or that nothing is bounded."""


class PolicyGradientKeys(Algorithm):
    """The keys that all combinations have."""

    group_size: GroupSize = 8
    groups: Groups = 16
    epochs: Positive = 1
    """How often each rollout batch is gone over."""
    mini_batches: Positive = 1
    """Optimizer steps in each epoch: parts of the rollout batch, drawn anew each time."""
    baseline: Baseline = "group_mean"
    deviation: Deviation = "unbiased"
    std_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation. verl has 1e-6, OpenRLHF 1e-9, TRL 1e-4."""
    group_of_one: Literal["zero", "reward"] = "zero"
    """What is left of the reward of a trajectory whose group has no other, as where the others were dropped:
    nothing, as in verl's `rloo_vectorized`, or all of it, undivided, as in verl's `grpo` and `rloo`."""
    turn_rewards: bool = False
    """Whether the rewards of turns count too, each at its turn's last token; otherwise a trajectory's
    alone."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the reward one trained token, or one turn, later."""
    discount_unit: Literal["token", "turn"] = "token"
    """Whether every trained token takes a step of discount, or every turn: the tokens of a turn then have the
    same weight. `gae_decay` is always of tokens."""
    reward_clip: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """Rewards of trajectories are clipped to these bounds."""
    truncated_reward: float | None = None
    """What the reward of a trajectory that was cut off is multiplied by; below 0: what it becomes."""
    overlong_length: Positive | None = None
    """Trained tokens from which on a trajectory has the whole overlong penalty of DAPO; absent: there is
    none."""
    overlong_buffer: Positive = 512
    """Tokens before overlong_length over which the penalty grows from 0."""
    overlong_factor: Annotated[float, Field(ge=0)] = 1.0
    """The whole overlong penalty, subtracted from the reward."""
    reward_kl: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from each token's reward: so many times its old logprob less the reference's (k1)."""
    reward_kl_order: Literal["after_baseline", "before_baseline"] = "after_baseline"
    """Whether the baseline is of rewards alone, and tokens have their KL penalties beside it, as in OpenRLHF;
    or of rewards less the sum of their trajectory's penalties, as in verl."""
    whitening: Whitening = "none"
    surrogate: Surrogate = "ppo_clip"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The loss of a token of negative advantage is at most this many times minus the advantage; absent: it is
    not bounded. verl's default is 3."""
    dro_beta: Annotated[float, Field(ge=0)] = 0.05
    """With the surrogate `dro`: weight of its quadratic term."""
    log_ratio_bound: Bound = LARGEST_LOG_RATIO
    """Logarithms of tokens' ratios are kept within so much of 0 before exp: 20 in verl and OpenRLHF; `"none"`
    as in AReaL and TRL."""
    sequence_log_ratio_bound: Bound = LARGEST_SEQUENCE_LOG_RATIO
    """With the surrogate `gspo`: the mean of a sample's is at most so much: 10 in verl; `"none"` as in
    OpenRLHF, AReaL and TRL."""
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Rewards of trajectories less their mean, divided by their standard deviation (plus 1e-8), before all
    penalties: of the rollout batch, or of all rewards so far."""
    reward_moments_of: Literal["trajectories", "samples"] = "trajectories"
    """Whether that mean and deviation count each trajectory once, or once for each of its samples, as steps
    did that were recorded before this key was."""
    reward_moments: Annotated[tuple[float, float, float], Field(strict=False)] | None = None
    """Count, mean and variance of the rewards before this step: the trainer writes it into each manifest."""
    old: Old = "engine"
    correction: Correction = "none"
    correction_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the correction's ratio."""
    correction_high: CorrectionHigh = 2.0
    count_rejected: bool = True
    """Whether tokens that the correction rejects count in the normalizer's denominator and in the KL term, as
    in AReaL and OpenRLHF; in verl they do not."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference policy in the loss of a token."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """The KL divergence from the reference policy (the metric `kl`) that `kl` and `reward_kl` adapt to, from
    step to step; absent: they stay as they are."""
    kl_horizon: Positive = 10_000
    """With `kl_target`: samples in which a coefficient changes by as much as the divergence is off, up to a
    fifth."""
    kl_estimator: KlEstimator = "k3"
    kl_bound: KlBound = "k3"
    """Which estimates of that divergence, and of `reward_kl`, are kept within +-10: `k3` alone, as in verl;
    all, as in OpenRLHF and AReaL; or none, as in TRL."""
    reference_version: Annotated[int, Field(ge=0)] = 0
    """The policy version that is the reference, of which there must be a checkpoint: 0 is the model that the
    run starts from."""
    ref_update_interval: Positive | None = None
    """Optimizer steps after which the policy's newest version takes the reference's place, again and again,
    each time at the end of a rollout batch; absent: the reference stays."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy of a token's distribution, which is subtracted from its loss."""
    normalizer: Normalization = "token_mean"
    constant_length: Positive = 1024
    """With the normalizer `constant`: tokens by which the sum of each sample is divided."""

    @model_validator(mode="after")
    def _consistent(self) -> PolicyGradientKeys:
        if self.correction != "none" and self.old != "trainer":
            raise ValueError(
                f"correction \"{self.correction}\" weighs the trainer's logprobs against the engine's: set "
                'old = "trainer"'
            )
        if self.correction_low > self.correction_high:
            raise ValueError(
                f"correction_low {self.correction_low:g} is more than "
                f"correction_high {self.correction_high:g}"
            )
        if self.reward_clip is not None and self.reward_clip[0] > self.reward_clip[1]:
            raise ValueError(f"reward_clip {list(self.reward_clip)}: write the lower bound first")
        if self.kl_target is not None and not (self.kl or self.reward_kl):
            raise ValueError("kl_target is what kl or reward_kl adapts to: set one of them above 0")
        if self.ref_update_interval is not None and "reference" not in self.needs:
            raise ValueError("ref_update_interval is of the reference: set kl or reward_kl above 0")
        if self.group_size == 1 and (self.baseline != "none" or self.deviation != "none"):
            raise ValueError(
                'group_size 1 leaves nothing to compare: set baseline = "none" and deviation = "none"'
            )
        if self.reward_kl_order == "before_baseline" and self.baseline == self.deviation == "none":
            raise ValueError(
                'reward_kl_order "before_baseline" asks for a baseline or a deviation, and there is neither'
            )
        return self
