"""Policy gradients without a critic: what their keys mean, and how the parts that they name make one loss."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rollbook.store.events import Json
from rollbook.train.algorithms.adapting import Moments, adapted
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.baselines import BASELINES, Grouped, deviations, grouped
from rollbook.train.algorithms.corrections import CORRECTIONS, Bounds
from rollbook.train.algorithms.normalizers import NORMALIZERS, Totals
from rollbook.train.algorithms.parts import OwnPart, part
from rollbook.train.algorithms.regularizers import KL_ESTIMATORS
from rollbook.train.algorithms.returns import at_last_tokens, discounted_returns, whitened, whole_returns
from rollbook.train.algorithms.rollouts import Advantages, Floats, Ints, Rollouts
from rollbook.train.algorithms.shaping import overlong_penalty, stopped_properly
from rollbook.train.algorithms.surrogates import SURROGATES, Clips, clipped
from rollbook.train.table import Positive

if TYPE_CHECKING:
    import torch


def _key(description: str) -> object:
    return Field(description=description)


Baseline = Annotated[
    Literal["group_mean", "leave_one_out", "none"] | OwnPart,
    _key("Subtracted from a reward: its group's mean, the mean of the others of its group, or nothing."),
]
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
Surrogate = Annotated[
    Literal["ppo_clip", "gspo", "cispo", "reinforce", "dro"] | OwnPart,
    _key(
        "The loss of a token: PPO's, with the ratio of each token or (`gspo`) of its sample; CISPO's; minus "
        "advantage times logprob; or that with DRO's quadratic term."
    ),
]
ClipLow = Annotated[float, Field(ge=0), _key("Lower clip: ratios are clipped at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(ge=0), _key("Upper clip: ratios are clipped at 1 + clip_high.")]
Normalization = Annotated[
    Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] | OwnPart,
    _key(
        "The mean over the batch's tokens; the mean over samples of the mean, or of the sum, over a sample's "
        "tokens; or the sum over all tokens, divided by samples times `constant_length`."
    ),
]
Old = Annotated[
    Literal["engine", "trainer"],
    _key(
        "Which policy ratios are taken to: the engine's logprobs as recorded, or those of the trainer's "
        "weights as the rollout batch begins, computed in a forward pass (decoupled PPO, arXiv:2505.24298)."
    ),
]
Correction = Annotated[
    Literal["none", "tis", "icepop", "sequence_tis", "sequence_mask_tis", "mis"] | OwnPart,
    _key(
        'With old = "trainer": how tokens are weighted by the ratio of the trainer\'s probability to the '
        "engine's. `tis` bounds the ratio, of a token or (`sequence_tis`) of a sample; `icepop` and `mis` "
        "reject tokens or samples beyond the bounds; `sequence_mask_tis` samples by the geometric mean."
    ),
]
CorrectionHigh = Annotated[float, Field(gt=0), _key("Upper bound of the correction's ratio.")]
Groups = Annotated[Positive, _key("Groups per rollout batch.")]
GroupSize = Annotated[
    int, Field(ge=1), _key("Trajectories per group; a group is used once it has this many.")
]


class GroupPolicyGradient(Algorithm):
    """The keys that all combinations have, and what they mean."""

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
    turn_rewards: bool = False
    """Whether the rewards of turns count too, each at its turn's last token; otherwise a trajectory's
    alone."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the reward one trained token later."""
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
    whitening: Whitening = "none"
    surrogate: Surrogate = "ppo_clip"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The loss of a token of negative advantage is at most this many times minus the advantage; absent: it is
    not bounded. verl's default is 3."""
    dro_beta: Annotated[float, Field(ge=0)] = 0.05
    """With the surrogate `dro`: weight of its quadratic term."""
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Rewards of trajectories less their mean, divided by their standard deviation (plus 1e-8), before all
    penalties: of the rollout batch, or of all rewards so far."""
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
    kl_estimator: Literal["k1", "k2", "k3"] | OwnPart = "k3"
    """How that divergence is estimated: `train/algorithms/regularizers.py`."""
    reference_version: Annotated[int, Field(ge=0)] = 0
    """The policy version that is the reference, of which there must be a checkpoint: 0 is the model that the
    run starts from."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy of a token's distribution, which is subtracted from its loss."""
    normalizer: Normalization = "token_mean"
    constant_length: Positive = 1024
    """With the normalizer `constant`: tokens by which the sum of each sample is divided."""

    @model_validator(mode="after")
    def _consistent(self) -> GroupPolicyGradient:
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
        if self.group_size == 1 and (self.baseline != "none" or self.deviation != "none"):
            raise ValueError(
                'group_size 1 leaves nothing to compare: set baseline = "none" and deviation = "none"'
            )
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """Logprobs and rewards; groups and the other policies by its keys."""
        wanted: dict[Need, bool] = {
            "logprobs": True,
            "rewards": True,
            "groups": self.group_size > 1,
            "old": self.old == "trainer",
            "reference": self.kl > 0 or self.reward_kl > 0,
            "entropy": self.entropy > 0,
        }
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)

    @property
    def demand(self) -> Demand:
        """`groups` groups of `group_size` trajectories, for `epochs` times `mini_batches` steps."""
        return Demand(self.groups, self.group_size, self.epochs, self.mini_batches)

    @property
    def reference(self) -> int | None:
        """Its key's, where a KL term asks for one."""
        return self.reference_version if "reference" in self.needs else None

    @property
    def counts_rejected(self) -> bool:
        """As its key says."""
        return self.count_rejected

    def advantages(self, of: Rollouts) -> Advantages:
        """Reward less baseline, divided by the group's deviation; by tokens where a key speaks of tokens."""
        scores = self.scores(self._shaped(of), of)
        if self.turn_rewards or self.discount < 1 or self.reward_kl > 0 or "values" in self.needs:
            return self.of_tokens(self._token_rewards(scores, of), of)
        if self.whitening == "none":
            return Advantages(scores)
        returns = whole_returns(scores, of.lengths)
        return Advantages(self.whitened(returns, out=returns), per_token=True)

    def of_tokens(self, rewards: Floats, of: Rollouts) -> Advantages:
        """Advantages of tokens from their rewards [P]: the discounted sum of what follows."""
        returns = discounted_returns(rewards, of.lengths, self.discount)
        return Advantages(self.whitened(returns, out=returns), per_token=True)

    def _shaped(self, of: Rollouts) -> Floats:
        """The reward of each sample's trajectory, cut-off and overlong ones less, clipped at last, [N]."""
        rewards = self._normalized(np.asarray(of.rewards, np.float64))
        if self.truncated_reward is not None and of.truncated is not None:
            members = grouped(rewards, of.groups, of.trajectories)
            cut_off = np.bincount(members.of_sample, of.truncated) > 0
            rewards = stopped_properly(rewards, cut_off[members.of_sample], self.truncated_reward)
        if self.overlong_length is not None:
            members = grouped(rewards, of.groups, of.trajectories)
            lengths = np.bincount(members.of_sample, of.lengths)[members.of_sample]
            penalty = overlong_penalty(lengths, self.overlong_length, self.overlong_buffer)
            rewards = rewards + self.overlong_factor * penalty
        return rewards if self.reward_clip is None else rewards.clip(*self.reward_clip)

    def _normalized(self, rewards: Floats) -> Floats:
        """Rewards as the key `reward_normalization` says; the moments so far include these."""
        if self.reward_normalization == "none":
            return rewards
        seen = Moments(*(self.reward_moments or ())) if self.reward_normalization == "running" else Moments()
        return seen.with_more(Moments.of(rewards)).normalized(rewards)

    @property
    def adapts(self) -> bool:
        """KL coefficients and the moments of rewards may."""
        return self.kl_target is not None or self.reward_normalization == "running"

    def after(self, metrics: Json) -> GroupPolicyGradient:
        """With the KL coefficients and the reward's moments that follow from a step."""
        changes: dict[str, Any] = {}
        kl, samples = metrics.get("kl"), int(metrics["samples"])
        if self.kl_target is not None and kl is not None:
            changes = {
                key: adapted(value, kl, self.kl_target, samples, self.kl_horizon)
                for key, value in (("kl", self.kl), ("reward_kl", self.reward_kl))
            }
        if self.reward_normalization == "running" and metrics.get("reward") is not None:
            seen = Moments(samples, metrics["reward"], metrics["reward_std"] ** 2)
            before = Moments(*(self.reward_moments or ()))
            changes["reward_moments"] = astuple(before.with_more(seen))
        return self.model_copy(update=changes) if changes else self

    def scores(self, rewards: Floats, of: Rollouts) -> Floats:
        """What becomes of each sample's reward, [N]."""
        members = grouped(np.asarray(rewards, np.float64), of.groups, of.trajectories)
        return members.for_samples(self._compared(members))

    def _compared(self, members: Grouped) -> Floats:
        scores = part(BASELINES, self.baseline)(members)
        if self.deviation == "none":
            return scores
        scale = deviations(members, int(self.deviation == "unbiased"))
        scale += self.std_epsilon
        return np.divide(scores, scale, out=scale)

    def _token_rewards(self, scores: Floats, of: Rollouts) -> Floats:
        """The rewards of tokens, [P]: of the trajectory at its last one, of turns at theirs, and the KL
        penalty."""
        rewards = at_last_tokens(scores, of.lengths)
        if self.turn_rewards and of.turn_rewards is not None:
            rewards += of.turn_rewards
        if self.reward_kl:
            assert of.old_logprobs is not None
            assert of.reference_logprobs is not None
            rewards -= self.reward_kl * (of.old_logprobs.astype(np.float64) - of.reference_logprobs)
        return rewards

    def whitened(self, values: Floats, out: Floats | None = None) -> Floats:
        """Advantages of all tokens [P], as the key `whitening` says; in `out`, which may be these, or a new
        array."""
        if self.whitening == "none" or not len(values):
            return values
        if self.whitening == "mean":
            return np.subtract(values, values.mean(), out=out)
        return whitened(values, int(self.whitening == "unbiased"), out=out)

    def weights(self, log_ratios: Floats, lengths: Ints) -> Floats | None:
        """The correction's, or None without one."""
        if self.correction == "none":
            return None
        return part(CORRECTIONS, self.correction)(
            log_ratios, lengths, Bounds(self.correction_low, self.correction_high)
        )

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """The surrogate of each token times the correction's weight, plus the KL term, less the entropy."""
        clips = Clips(self.clip_low, self.clip_high, self.dual_clip, self.dro_beta)
        loss = part(SURROGATES, self.surrogate)(inputs, clips)
        if inputs.weights is not None:
            loss = loss * inputs.weights
        if self.kl:
            assert inputs.reference_logprobs is not None
            loss = loss + self.kl * part(KL_ESTIMATORS, self.kl_estimator)(
                inputs.logprobs - inputs.reference_logprobs
            )
        if self.entropy:
            assert inputs.entropy is not None
            loss = loss - self.entropy * inputs.entropy
        return loss

    def clipped(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where its surrogate's clips are at work."""
        return clipped(self.surrogate, inputs, Clips(self.clip_low, self.clip_high))

    def add(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum that the normalizer takes."""
        return part(NORMALIZERS, self.normalizer).add(losses, mask)

    def divisor(self, totals: Totals) -> int:
        """The number that the normalizer divides by."""
        return part(NORMALIZERS, self.normalizer).divisor(totals, self.constant_length)
