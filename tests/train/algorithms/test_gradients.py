"""The gradient of every part is the derivative of its value, by finite differences in float64.

Two surrogates hold something still on purpose, and so do these tests: GSPO's gradient is that of the sum over
a sample, and CISPO's that of fixed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from rollbook.train.algorithms import reward_models
from rollbook.train.algorithms.algorithm import LossInputs, ScoreInputs
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.preferences import PREFERENCE_LOSSES
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.surrogates import KL_ESTIMATORS, SURROGATES, Clips, estimate
from rollbook.train.step.predictions import entropies

Of = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (4, 5)
MASK = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEAR, FAR = 0.4 * _normal(1), 3.0 * _normal(2)
"""Log-ratios, some beyond clips; and some beyond every clip."""
ADVANTAGES = _normal(3, 4, 1).expand(SHAPE)


def _inputs(logprobs: torch.Tensor, old: torch.Tensor, **others: Any) -> LossInputs:
    return LossInputs.whole(logprobs, old, ADVANTAGES, MASK, **others)


def _surrogate(name: str, clips: Clips, ratios: torch.Tensor) -> Of:
    start = -_normal(0).abs()

    def losses_of(logprobs: torch.Tensor) -> torch.Tensor:
        old = (logprobs.detach() if name == "cispo" else start) - ratios
        losses = torch.where(MASK, SURROGATES[name](_inputs(logprobs, old), clips), 0.0)
        return losses.sum(-1) if name == "gspo" else losses

    return losses_of


def _composed(**keys: Any) -> Of:
    """The whole loss of a batch: surrogate, weights, KL term, entropy and normalizer."""
    algorithm = recorded_algorithm({"name": "policy_gradient", "constant_length": 7} | keys)
    assert isinstance(algorithm, GroupPolicyGradient)
    start, weights = -_normal(0).abs(), _normal(4).abs()

    def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
        inputs = _inputs(
            logprobs,
            start - NEAR,
            weights=weights,
            reference_logprobs=start - 0.3 * _normal(5),
            entropy=entropies(torch.stack([logprobs, start], -1).log_softmax(-1)),
        )
        losses = torch.where(MASK, algorithm.loss(inputs), 0.0)
        return algorithm.add(losses, MASK) / algorithm.divisor(inputs.totals)

    return loss_of


def _value_loss(clip: float | None) -> Of:
    algorithm = recorded_algorithm({"name": "ppo", "value_clip": clip})
    return lambda values: algorithm.value_loss(values, _normal(6), _normal(7))


def _pairs(name: str = "dpo", **keys: Any) -> Of:
    algorithm = recorded_algorithm({"name": name} | keys)
    return lambda logprobs: algorithm.loss(_inputs(logprobs, logprobs, reference_logprobs=_normal(8)))


def _reward_model(**keys: Any) -> Of:
    algorithm = recorded_algorithm({"name": "reward_model"} | keys)
    margins, rewards = _normal(9, 4).abs(), _normal(10, 4)

    def loss_of(scores: torch.Tensor) -> torch.Tensor:
        mean = float(scores[:, 0].mean()) if "batch_score" in algorithm.needs else None
        losses = algorithm.score_loss(ScoreInputs(scores[:, : algorithm.head_width], margins, rewards, mean))
        return losses.sum() / 2  # of pairs, as a step divides them

    return loss_of


PARTS: dict[str, Of] = {
    **{
        f"{name}, {kind}": _surrogate(name, clips, ratios)
        for name in SURROGATES
        for kind, clips, ratios in (
            ("near", Clips(0.2, 0.3, beta=0.7), NEAR),
            ("far", Clips(0.2, 0.3, beta=0.7), FAR),
            ("dual", Clips(0.2, 0.3, 1.5, 0.7), FAR),
            ("free", Clips(0.2, 0.3, None, 0.7, None, None), FAR),
        )
    },
    **{
        f"{name}, bound {bound}": lambda d, name=name, bound=bound: estimate(name, bound, 4 * d)  # type: ignore[misc]
        for name in KL_ESTIMATORS
        for bound in ("k3", "all", "none")
    },
    **{f"value loss, clip {clip}": _value_loss(clip) for clip in (None, 0.5)},
    "entropy": lambda logits: entropies(logits[None].log_softmax(-1)),
    **{
        f"dpo, {name}, {normalized}": _pairs(preference_loss=name, length_normalized=normalized)
        for name in PREFERENCE_LOSSES
        for normalized in (False, True)
    },
    "dpo, smoothed": _pairs(label_smoothing=0.2, beta=0.5),
    "dpo, with cross-entropy": _pairs(sft_weight=0.7),
    "simpo": _pairs("simpo"),
    "orpo": _pairs("orpo", odds_weight=0.5),
    **{
        f"reward model, {keys}": _reward_model(**keys)
        for keys in (
            {},
            {"margin": "recorded"},
            {"margin": "rewards"},
            {"centring": 0.3},
            {"batch_sum_to_zero": 0.7},
            {"head": "mean_deviation"},
        )
    },
    "centring": lambda scores: reward_models.centring(scores[:, 0]),
    **{f"whole loss, {name}": _composed(normalizer=name) for name in NORMALIZERS},
    **{
        f"whole loss, {name}": _composed(
            surrogate=name, kl=0.3, entropy=0.1, kl_estimator="k2", dual_clip=3.0
        )
        for name in ("ppo_clip", "reinforce", "dro")
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_the_gradient_is_the_derivative(name: str) -> None:
    """At a random point, which no kink has."""
    point = (-_normal(0).abs()).requires_grad_()
    assert torch.autograd.gradcheck(PARTS[name], (point,))


def test_every_part_is_here() -> None:
    """A function that is added to a registry is checked without a line here."""
    for family in (SURROGATES, KL_ESTIMATORS, PREFERENCE_LOSSES, NORMALIZERS):
        for part in family:
            assert any(part in name for name in PARTS)


def test_a_wrong_gradient_is_seen() -> None:
    """A weight that is not held still fails the check: it can fail."""
    clips, start = Clips(0.2, 0.3), -_normal(0).abs()
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(
            lambda logprobs: SURROGATES["cispo"](_inputs(logprobs, start - 0.1), clips),
            (start.clone().requires_grad_(),),
        )
