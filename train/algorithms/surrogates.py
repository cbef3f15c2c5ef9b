"""The loss of each token: surrogates, whose gradient is that of the policy, and regularizers, which are added
to them. Pure torch.

In all surrogates r = exp(logprob - old logprob), the ratio of the policy in training to the old one (the
engine's, or the trainer's as the batch began), l and h are the clips, and A is the advantage. The estimates
of KL(policy || reference) from one sampled token are those of Schulman 2020, "Approximating KL Divergence"
(joschu.net/blog/kl-approx.html), with d = logprob - reference logprob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollbook.train.algorithms.parts import call_part, part

if TYPE_CHECKING:
    import torch

    from rollbook.train.algorithms.algorithm import LossInputs

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are within +-20 in verl and OpenRLHF."""
LARGEST_SEQUENCE_LOG_RATIO = 10.0
"""The mean log-ratio of a sample is at most 10 in verl."""


@dataclass(frozen=True, slots=True)
class Clips:
    """Bounds of the ratio: 1 - low to 1 + high; `dual`, if any, bounds the loss of a bad token; `beta` is
    DRO's. Log-ratios are kept within +-`log_ratio`, and those of samples to at most `sequence_log_ratio`,
    before exp; None: they are not."""

    low: float
    high: float
    dual: float | None = None
    beta: float = 0.0
    log_ratio: float | None = LARGEST_LOG_RATIO
    sequence_log_ratio: float | None = LARGEST_SEQUENCE_LOG_RATIO


def ppo_clip(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    """-min(r A, clip(r, 1 - l, 1 + h) A), and with dual clip c at least c A where A < 0; [B, T - 1].

    Sources: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; asymmetric bounds, DAPO, Yu et al. 2025
    (arXiv:2503.14476); dual clip, Ye et al. 2020 (arXiv:1912.09729), equation 5. Dual clip is off by default;
    verl's default is c = 3.
    """
    return _clipped(_ratio(inputs, clips), inputs, clips)


def gspo(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    """`ppo_clip` with one ratio for a sample: the geometric mean of its tokens' ratios; [B, T - 1].

    The gradient flows through each token's own logprob (GSPO-token, whose gradient equals that of GSPO where
    all tokens have the same advantage). Source: Zheng et al. 2025 (arXiv:2507.18071), equations 7 and 14.
    """
    return _clipped(_sequence_ratio(inputs, clips), inputs, clips)


def cispo(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    """-sg(clip(r, 1 - l, 1 + h)) A logprob, [B, T - 1]: weights are clipped, every token keeps its gradient.

    Source: MiniMax-M1, Chen et al. 2025 (arXiv:2506.13585), equation 4. The cap is 1 + h, as in verl and
    slime; TRL's `epsilon_high` is the cap itself.
    """
    weight = _ratio(inputs, clips).detach().clamp(1 - clips.low, 1 + clips.high)
    return -weight * inputs.advantages * inputs.logprobs


def reinforce(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    """-A logprob; [B, T - 1]. Source: Williams 1992. Staleness is not corrected, and clips do nothing."""
    return -inputs.advantages * inputs.logprobs


def dro(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    """-A logprob + beta / 2 (logprob - old logprob)^2; [B, T - 1]. Nothing is clipped.

    Source: direct reward optimization, Richemond et al. 2024 (arXiv:2405.19107), equation 9, with the
        advantage in
    place of reward less value. Tinker and verl have it.
    """
    difference = inputs.logprobs - inputs.old_logprobs
    return clips.beta / 2 * difference.square() - inputs.advantages * inputs.logprobs


SURROGATES: Mapping[str, Callable[[LossInputs, Clips], torch.Tensor]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dro": dro,
}


def clipped(surrogate: str, inputs: LossInputs, clips: Clips) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where the lower and the upper clip are active, bool [B, T - 1]; None without clips.

    A clipped token has no gradient; with CISPO only its weight is clipped.
    """
    if surrogate not in _RATIOS:
        return None
    ratio = _RATIOS[surrogate](inputs, clips)
    low, high = ratio < 1 - clips.low, ratio > 1 + clips.high
    if surrogate == "cispo":
        return low, high
    return low & (inputs.advantages < 0), high & (inputs.advantages > 0)


def dual_clipped(surrogate: str, inputs: LossInputs, clips: Clips) -> torch.Tensor | None:
    """Where the dual clip leaves a bad token without a gradient, bool [B, T - 1]; None without one."""
    if surrogate not in ("ppo_clip", "gspo") or clips.dual is None:
        return None
    return (_RATIOS[surrogate](inputs, clips) > clips.dual) & (inputs.advantages < 0)


def _sequence_ratio(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    import torch

    log_ratio = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (log_ratio.sum(-1, keepdim=True) / lengths).detach()
    log_sequence = inputs.logprobs - inputs.logprobs.detach() + mean
    if clips.sequence_log_ratio is not None:
        log_sequence = log_sequence.clamp(max=clips.sequence_log_ratio)
    return log_sequence.exp()


def _ratio(inputs: LossInputs, clips: Clips) -> torch.Tensor:
    difference = inputs.logprobs - inputs.old_logprobs
    if clips.log_ratio is not None:
        difference = difference.clamp(-clips.log_ratio, clips.log_ratio)
    return difference.exp()


def _clipped(ratio: torch.Tensor, inputs: LossInputs, clips: Clips) -> torch.Tensor:
    import torch

    advantages = inputs.advantages
    clamped = ratio.clamp(1 - clips.low, 1 + clips.high)
    loss = -(ratio * advantages).minimum(clamped * advantages)
    if clips.dual is None:
        return loss
    return torch.where(advantages < 0, loss.minimum(-clips.dual * advantages), loss)


_RATIOS: Mapping[str, Callable[[LossInputs, Clips], torch.Tensor]] = {
    "ppo_clip": _ratio,
    "gspo": _sequence_ratio,
    "cispo": _ratio,
}
"""The ratio that a surrogate clips."""


KlBound = Literal["k3", "all", "none"]
"""Which estimates are kept within +-10."""
LARGEST_DIFFERENCE = 20.0
LARGEST_ESTIMATE = 10.0
"""verl clamps d to +-20 and k3 to +-10; OpenRLHF and AReaL clamp every estimate to +-10; TRL clamps none."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    """d: unbiased. Its own gradient is zero on average, so it belongs in the reward, not in the loss."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, yet its gradient is that of the KL divergence on policy."""
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; GRPO's (arXiv:2402.03300), equation 4."""
    bounded = difference.clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    return unbounded_k3(bounded).clamp(-LARGEST_ESTIMATE, LARGEST_ESTIMATE)


def unbounded_k3(difference: torch.Tensor) -> torch.Tensor:
    """The same, whatever d is."""
    return (-difference).exp() - 1 + difference


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> d [B, T - 1] -> the estimate [B, T - 1]."""


def estimate(estimator: str, bound: KlBound, difference: torch.Tensor) -> torch.Tensor:
    """The value of a KL estimator, possibly the user's own, for each token's difference, [B, T -
    1].

    Raises:
        TrainError: it gives another shape.
    """
    if (estimator, bound) == ("k3", "none"):
        return unbounded_k3(difference)
    function = part(KL_ESTIMATORS, estimator)
    estimates = call_part("kl_estimator", estimator, function, tuple(difference.shape), difference)
    return estimates.clamp(-LARGEST_ESTIMATE, LARGEST_ESTIMATE) if bound == "all" else estimates
