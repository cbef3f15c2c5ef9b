"""Policy gradients without a critic, such as GRPO: what their keys mean, and how the parts that the
keys name are combined into one loss.

Two things are carried from step to step: a KL coefficient that follows a target, and the moments
of all rewards so far. Both are keys of the algorithm, so the manifest of each step holds the
values that it used, and the next ones follow from it and from the step's metrics.

The keys of a policy gradient, and the types of those whose default differs in some combination.

The names that a key may have are those in its registry: a function added there becomes a legal
value, in a CONFIG and on the page of all keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rollbook.store.config import Positive
from rollbook.store.events import Json
from rollbook.train.algorithms.advantages import (
    BASELINES,
    Grouped,
    deviations,
    grouped,
    overlong_penalty,
    stopped_properly,
    trajectory_advantages,
    with_others,
)
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.corrections import CORRECTIONS, Bounds
from rollbook.train.algorithms.normalizers import NORMALIZERS, Totals
from rollbook.train.algorithms.parts import (
    PART_KEYS,
    OwnPart,
    call_part,
    check_declared,
    declared_needs,
    part,
)
from rollbook.train.algorithms.returns import (
    at_last_tokens,
    discounted_returns,
    from_last_tokens,
    of_trajectories,
    turn_returns,
    whitened,
    whole_returns,
)
from rollbook.train.algorithms.rollouts import Advantages, Floats, Ints, Rollouts
from rollbook.train.algorithms.surrogates import (
    KL_ESTIMATORS,
    LARGEST_ESTIMATE,
    LARGEST_LOG_RATIO,
    LARGEST_SEQUENCE_LOG_RATIO,
    SURROGATES,
    Clips,
    KlBound,
    clipped,
    dual_clipped,
    estimate,
)

if TYPE_CHECKING:
    import torch


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


Bools = npt.NDArray[np.bool_]


class GroupPolicyGradient(PolicyGradientKeys):
    """What the keys that all combinations have mean."""

    @model_validator(mode="after")
    def _met(self) -> GroupPolicyGradient:
        self._can_meet()
        return self

    def _can_meet(self) -> None:
        """Check that the user's own parts can be given what they declare to need."""
        remedies = {
            "old": 'set old = "trainer"' if self.old != "trainer" else "",
            "groups": "set group_size above 1" if self.group_size == 1 else "",
            "values": 'only name = "ppo" has a critic' if "values" not in self._own_needs else "",
        } | dict.fromkeys(("pairs", "margins", "batch_score"), "a policy gradient has none")
        check_declared(self._declared, remedies)

    @property
    def needs(self) -> frozenset[Need]:
        """What the keys need, and what the user's own parts declare to need."""
        declared = frozenset[str]().union(*self._declared.values())
        return self._own_needs | cast("frozenset[Need]", declared)

    @property
    def _declared(self) -> dict[tuple[str, str], frozenset[str]]:
        return declared_needs({key: getattr(self, key) for key in PART_KEYS})

    @property
    def _own_needs(self) -> frozenset[Need]:
        """Logprobs and rewards; groups and the other policies if the keys need them."""
        wanted: dict[Need, bool] = {
            "logprobs": True,
            "rewards": True,
            "turn_rewards": self.turn_rewards,
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
        """The version that its key names, where a KL term needs one."""
        return self.reference_version if "reference" in self.needs else None

    @property
    def reference_interval(self) -> int | None:
        """Its key's."""
        return self.ref_update_interval

    @property
    def counts_rejected(self) -> bool:
        """As its key says."""
        return self.count_rejected

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Reward less baseline, divided by the group's deviation; per token where a key is about
        tokens."""
        moments = self._moments(rollouts)
        if (others := rollouts.others) is not None:
            rewards = self._penalized(
                self._normalized(others.rewards, moments), others.truncated, others.lengths
            )
            rollouts = replace(rollouts, others=replace(others, rewards=rewards))
        rewards = self._shaped(rollouts, moments)
        if self._kl_first:
            rewards = rewards - of_trajectories(self.reward_kl * self._divergences(rollouts), rollouts)
        scores = self.scores(rewards, rollouts)
        if self._at_ends and self.whitening == "none" and "values" not in self.needs:
            return Advantages(scores)
        return self.of_tokens(self._token_rewards(scores, rollouts), rollouts)

    @property
    def _at_ends(self) -> bool:
        """Whether the only reward in a sample is the trajectory's, at its last token, undiscounted."""
        of_tokens = self.turn_rewards or (self.reward_kl > 0 and not self._kl_first)
        return not of_tokens and self.discount == 1

    def of_tokens(self, rewards: Floats, rollouts: Rollouts) -> Advantages:
        """Advantages of tokens from their rewards [P]: the discounted sum of what follows."""
        if self._at_ends:
            returns = whole_returns(from_last_tokens(rewards, rollouts.lengths), rollouts.lengths)
        elif self.discount_unit == "turn":
            returns = turn_returns(rewards, rollouts, self.discount)
        else:
            returns = discounted_returns(rewards, rollouts.lengths, self.discount)
        return Advantages(self.whitened(returns, out=returns), per_token=True)

    def _shaped(self, rollouts: Rollouts, moments: Moments | None) -> Floats:
        """The reward of each sample's trajectory, lowered if cut off or overlong, then clipped,
        [N]."""
        rewards = self._normalized(np.asarray(rollouts.rewards, np.float64), moments)
        truncated, lengths = rollouts.truncated, rollouts.lengths
        if self.truncated_reward is not None or self.overlong_length is not None:
            of_sample = grouped(rewards, rollouts.groups, rollouts.trajectories).of_sample
            lengths = np.bincount(of_sample, rollouts.lengths)[of_sample].astype(np.int64)
            if truncated is not None:
                truncated = (np.bincount(of_sample, truncated) > 0)[of_sample]
        return self._penalized(rewards, truncated, lengths)

    def _penalized(self, rewards: Floats, truncated: Bools | None, lengths: Ints) -> Floats:
        """Rewards of trajectories with the given token counts, less their penalties, and clipped."""
        if self.truncated_reward is not None and truncated is not None:
            rewards = stopped_properly(rewards, truncated, self.truncated_reward)
        if self.overlong_length is not None:
            penalty = overlong_penalty(lengths, self.overlong_length, self.overlong_buffer)
            rewards = rewards + self.overlong_factor * penalty
        return rewards if self.reward_clip is None else rewards.clip(*self.reward_clip)

    def _moments(self, rollouts: Rollouts) -> Moments | None:
        """The moments to normalize rewards by, these samples included; None: rewards are not
        normalized."""
        if self.reward_normalization == "none":
            return None
        moments = (
            Moments(*(self.reward_moments or ())) if self.reward_normalization == "running" else Moments()
        )
        once, rewards = self.reward_moments_of == "trajectories", np.asarray(rollouts.rewards, np.float64)
        counted = grouped(rewards, rollouts.groups, rollouts.trajectories).rewards if once else rewards
        return moments.with_more(Moments.of(counted))

    def _normalized(self, rewards: Floats, moments: Moments | None) -> Floats:
        """Rewards as the key `reward_normalization` says."""
        return rewards if moments is None else moments.normalized(rewards)

    @property
    def adapts(self) -> bool:
        """KL coefficients, the moments of rewards and the reference may change."""
        follows = self.kl_target is not None or self.reward_normalization == "running"
        return follows or self.ref_update_interval is not None

    def after(self, metrics: Json) -> GroupPolicyGradient:
        """The algorithm with the KL coefficients and the reward moments that follow from a step."""
        changes: dict[str, Any] = {}
        kl, samples = metrics.get("kl"), int(metrics["samples"])
        if self.kl_target is not None and kl is not None:
            changes = {
                key: adapted(value, kl, self.kl_target, samples, self.kl_horizon)
                for key, value in (("kl", self.kl), ("reward_kl", self.reward_kl))
            }
        moments = moments_of(metrics, self.reward_moments_of)
        if self.reward_normalization == "running" and moments is not None:
            before = Moments(*(self.reward_moments or ()))
            changes["reward_moments"] = astuple(before.with_more(moments))
        return self.model_copy(update=changes) if changes else self

    def scores(self, rewards: Floats, rollouts: Rollouts) -> Floats:
        """The score that each sample's reward becomes, [N]."""
        members = grouped(np.asarray(rewards, np.float64), rollouts.groups, rollouts.trajectories)
        return members.for_samples(self._compared(with_others(members, rollouts.others)))

    def _compared(self, members: Grouped) -> Floats:
        baseline, shape = part(BASELINES, self.baseline), members.rewards.shape
        scores = call_part("baseline", self.baseline, baseline, shape, members)
        alone = (members.sizes == 1)[members.groups] if self.group_of_one == "reward" else None
        if alone is not None:
            scores = np.where(alone, members.rewards, scores)
        if self.deviation == "none":
            return scores
        scale = deviations(members, int(self.deviation == "unbiased"))
        if alone is not None:
            scale = np.where(alone, 1.0, scale)
        scale += self.std_epsilon
        return np.divide(scores, scale, out=scale)

    def _token_rewards(self, scores: Floats, rollouts: Rollouts) -> Floats:
        """The rewards of tokens, [P]: of the trajectory at its last one, of turns at theirs, and the KL
        penalty."""
        rewards = at_last_tokens(scores, rollouts.lengths)
        if self.turn_rewards and rollouts.turn_rewards is not None:
            rewards += rollouts.turn_rewards
        if self.reward_kl and not self._kl_first:
            rewards -= self.reward_kl * self._divergences(rollouts)
        return rewards

    @property
    def _kl_first(self) -> bool:
        """Whether the KL penalty comes before the baseline."""
        return self.reward_kl > 0 and self.reward_kl_order == "before_baseline"

    def _divergences(self, rollouts: Rollouts) -> Floats:
        """k1 of the old policy to the reference, [P]."""
        assert rollouts.old_logprobs is not None
        assert rollouts.reference_logprobs is not None
        gaps = rollouts.old_logprobs.astype(np.float64) - rollouts.reference_logprobs
        return gaps.clip(-LARGEST_ESTIMATE, LARGEST_ESTIMATE) if self.kl_bound == "all" else gaps

    def whitened(self, values: Floats, out: Floats | None = None) -> Floats:
        """Advantages of all tokens [P], whitened as the key `whitening` says; written to `out`,
        which may be the same array, or to a new array."""
        if self.whitening == "none" or not len(values):
            return values
        if self.whitening == "mean":
            return np.subtract(values, values.mean(), out=out)
        return whitened(values, int(self.whitening == "unbiased"), out=out)

    def weights(self, log_ratios: Floats, lengths: Ints) -> Floats | None:
        """The weights of the correction, or None without one."""
        if self.correction == "none":
            return None
        correction, shape = part(CORRECTIONS, self.correction), log_ratios.shape
        bounds = Bounds(self.correction_low, self.correction_high)
        return call_part("correction", self.correction, correction, shape, log_ratios, lengths, bounds)

    @property
    def clips(self) -> Clips:
        """The clips that the surrogate gets beside its inputs."""
        tokens, samples = (
            None if bound == "none" else bound
            for bound in (self.log_ratio_bound, self.sequence_log_ratio_bound)
        )
        return Clips(self.clip_low, self.clip_high, self.dual_clip, self.dro_beta, tokens, samples)

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """The surrogate of each token times the correction's weight, plus the KL term, less the entropy."""
        surrogate, shape = part(SURROGATES, self.surrogate), tuple(inputs.logprobs.shape)
        loss = call_part("surrogate", self.surrogate, surrogate, shape, inputs, self.clips)
        if inputs.weights is not None:
            loss = loss * inputs.weights
        if self.kl:
            assert inputs.reference_logprobs is not None
            difference = inputs.logprobs - inputs.reference_logprobs
            loss = loss + self.kl * estimate(self.kl_estimator, self.kl_bound, difference)
        if self.entropy:
            assert inputs.entropy is not None
            loss = loss - self.entropy * inputs.entropy
        return loss

    def clipped(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where its surrogate's clips are at work."""
        return clipped(self.surrogate, inputs, self.clips)

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """For each trained token, whether the dual clip is active, where there is one."""
        dual = dual_clipped(self.surrogate, inputs, self.clips)
        return {} if dual is None else {"clipped_dual": dual[inputs.mask]}

    def add(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum that the normalizer takes."""
        normalizer = part(NORMALIZERS, self.normalizer)
        return call_part("normalizer", self.normalizer, normalizer.add, (), losses, mask)

    def divisor(self, totals: Totals) -> int:
        """The number that the normalizer divides by."""
        return part(NORMALIZERS, self.normalizer).divisor(totals, self.constant_length)


class Grpo(GroupPolicyGradient):
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300), averaged as in DAPO.

    The loss is the mean over the batch's trained tokens (Yu et al. 2025, arXiv:2503.14476), not the mean of
    each sample's mean. Advantages are divided by the group's unbiased standard deviation.
    """

    name: Literal["grpo"]
    """The algorithm that the other keys of the table belong to."""

    def scores(self, rewards: Floats, rollouts: Rollouts) -> Floats:
        """As for any combination; with its own baseline and deviation, with the same bits as in the
        first release."""
        own = (self.baseline, self.deviation, self.group_of_one)
        if own != ("group_mean", "unbiased", "zero") or rollouts.others is not None:
            return super().scores(rewards, rollouts)
        return trajectory_advantages(rewards, rollouts.groups, rollouts.trajectories, self.std_epsilon)


LARGEST_ERROR = 0.2
"""The relative error of the KL divergence counts up to this much in a step."""
EPSILON = 1e-8
"""Added to the standard deviation of rewards."""


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The coefficient after a step of so many samples: raised where the divergence is above its target.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2. verl and OpenRLHF have it.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * samples / horizon)


@dataclass(frozen=True, slots=True)
class Moments:
    """The count, mean and variance (over n) of some numbers."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @staticmethod
    def of(values: Floats) -> Moments:
        """The moments of an array."""
        return Moments(len(values), float(values.mean()), float(values.var())) if len(values) else Moments()

    def with_more(self, other: Moments) -> Moments:
        """The moments of both together. Source: Chan, Golub and LeVeque 1979, equation 2.1."""
        count = self.count + other.count
        if not count:
            return self
        delta, share = other.mean - self.mean, other.count / count
        spread = self.variance * self.count + other.variance * other.count
        spread += delta**2 * self.count * share
        return Moments(count, self.mean + delta * share, spread / count)

    def normalized(self, values: Floats) -> Floats:
        """The values less the mean, divided by the standard deviation."""
        return np.asarray((values - self.mean) / (np.sqrt(self.variance) + EPSILON))


def moments_of(metrics: Json, what: str) -> Moments | None:
    """The moments of a step's rewards, from its metrics; None where it had none.

    Args:
        what: `trajectories`, each counted once, or `samples`.
    """
    names = {
        "trajectories": ("trajectories", "trajectory_reward", "trajectory_reward_std"),
        "samples": ("samples", "reward", "reward_std"),
    }
    count, mean, deviation = (metrics.get(name) for name in names[what])
    if count is None or mean is None or deviation is None:
        return None
    return Moments(int(count), mean, deviation**2)
