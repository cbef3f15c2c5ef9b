"""Reward models: a head of scores, trained on pairs of samples of which one is preferred."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Need, ScoreInputs
from rollbook.train.algorithms.preferences import Pairs, gaps_of, ratings
from rollbook.train.algorithms.rollouts import Floats

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

NODES, WIDTH = 2401, 12.0
"""Of the grid on which a normal distribution of scores is averaged: places, and standard deviations."""
TEMPERATURES = (1e-3, 1e3)
"""Bounds of a temperature that is fitted: pairs that are all rated right, or as often wrong as right, have
none."""


class RewardModel(Pairs):
    """A Bradley-Terry reward model: the probability that a sample is preferred to another is the
    sigmoid of the difference of their scores (Ouyang et al. 2022, arXiv:2203.02155)."""

    name: Literal["reward_model"]
    """The algorithm that the other keys of the table belong to."""
    head: Literal["score", "mean_deviation"] = "score"
    """What the model gives a sample: a score; or the mean and the logarithm of the standard deviation of a
    normal distribution of scores (PURM)."""
    margin: Literal["none", "recorded", "rewards"] = "none"
    """What the difference of a pair's scores is to exceed: 0; what the preference says; or the difference of
    the samples' rewards."""
    centring: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean square of the sum of a pair's scores, which keeps scores around 0."""
    batch_sum_to_zero: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the square of the mean score of the batch's samples (BSR)."""

    @model_validator(mode="after")
    def _recorded(self) -> RewardModel:
        if self.margin == "recorded" and self.pairs != "preferences":
            raise ValueError('margin = "recorded" belongs to pairs = "preferences"')
        return self

    @property
    def head_width(self) -> int:
        """1; 2 where a score is a distribution."""
        return 1 if self.head == "score" else 2

    @property
    def needs(self) -> frozenset[Need]:
        """What pairs, its margin and its regularizer need."""
        needs = set(super().needs)
        needs |= {"margins"} if self.margin == "recorded" else set()
        needs |= {"rewards"} if self.margin == "rewards" else set()
        return frozenset(needs | ({"batch_score"} if self.batch_sum_to_zero else set()))

    def score_loss(self, inputs: ScoreInputs) -> torch.Tensor:
        """The loss of a pair, in equal shares on both its samples, [B]."""
        gaps = gaps_of(inputs.scores[:, 0]) - self._margins(inputs)
        losses = bradley_terry(gaps) if self.head == "score" else uncertain(gaps, _spread(inputs.scores))
        if self.centring:
            losses = losses + self.centring * centring(inputs.scores[:, 0])
        shares = (losses / 2).repeat_interleave(2)
        if inputs.batch_score is not None:
            shares = (
                shares + self.batch_sum_to_zero * sum_to_zero(inputs.scores[:, 0], inputs.batch_score) / 2
            )
        return shares

    def score_measures(self, inputs: ScoreInputs) -> dict[str, torch.Tensor]:
        """For each pair, whether its scores are in the order of the preference, and their
        difference; for each sample its score, and its standard deviation where a score is a
        distribution."""
        gaps = gaps_of(inputs.scores[:, 0])
        measures = ratings(gaps, gaps) | {"score_mean": inputs.scores[:, 0]}
        return measures | ({"score_deviation": inputs.scores[:, 1].exp()} if self.head_width == 2 else {})

    def fitted(self, measured: Mapping[str, Floats]) -> Json:
        """The temperature by which scores of `head = "score"` are calibrated, and the loss with it."""
        if self.head != "score":
            return {}
        gaps = np.asarray(measured["preference_margin"], np.float64)
        temperature = calibration_temperature(gaps)
        if temperature is None:
            return {}
        loss = float(np.logaddexp(0, -gaps / temperature).mean())
        return {"calibration_temperature": temperature, "calibrated_loss": loss}

    def _margins(self, inputs: ScoreInputs) -> torch.Tensor:
        """The margin that each pair's difference is to exceed, [B / 2]."""
        if self.margin == "rewards":
            return gaps_of(inputs.rewards)
        return inputs.margins[0::2] if self.margin == "recorded" else inputs.margins.new_zeros(())


def bradley_terry(gaps: torch.Tensor) -> torch.Tensor:
    """-log sigma(gap), where the margin is taken off the gap, [B / 2].

    Source: Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin is Llama 2's, Touvron et al. 2023
    (arXiv:2307.09288), equation 2.
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(gaps)


def uncertain(gaps: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """-log of the mean of sigma(z) over z, normal around the gap with this standard deviation, [B /
    2].

    Source: PURM, Sun et al. 2025 (arXiv:2503.22480), which takes the mean over samples of z.
    Here it is computed by the trapezoid rule, so that the same weights give the same bits: its
    error is below float32's for deviations up to 30.
    """
    import torch
    from torch.nn.functional import logsigmoid

    places = torch.linspace(-WIDTH, WIDTH, NODES, dtype=torch.float64, device=gaps.device)
    step = 2 * WIDTH / (NODES - 1)
    logs = (math.log(step / math.sqrt(2 * math.pi)) - places.square() / 2).to(gaps.dtype)
    z = gaps[:, None] + deviations[:, None] * places.to(gaps.dtype)
    return -torch.logsumexp(logs + logsigmoid(z), -1)


def centring(scores: torch.Tensor) -> torch.Tensor:
    """The square of the sum of a pair's scores, [B / 2] of [B].

    Source: Eisenstein et al. 2023 (arXiv:2312.09244), equation 3: sum-to-zero within a pair.
    """
    return (scores[0::2] + scores[1::2]).square()


def sum_to_zero(scores: torch.Tensor, batch_score: float) -> torch.Tensor:
    """The batch's squared mean score as a loss of each of its samples, [B]: their mean equals that
    square and has its gradient, whatever the micro-batches.

    Source: batch-wise sum-to-zero regularization, Hong et al. 2025 (arXiv:2505.07271). The
    published code multiplies its weight by the pairs of a micro-batch.

    Args:
        batch_score: the mean, by the same weights, without a gradient.
    """
    return 2 * batch_score * scores - batch_score**2


def calibration_temperature(gaps: Floats) -> float | None:
    """The temperature T that minimizes the mean of -log sigma(gap / T); None if none within the
    bounds does.

    Source: temperature scaling, Guo et al. 2017 (arXiv:1706.04599), section 4.2. The loss is
    convex in 1 / T, so the zero of its derivative is found by bisection.
    """
    low, high = (math.log(1 / bound) for bound in reversed(TEMPERATURES))
    if _slope(gaps, math.exp(low)) >= 0 or _slope(gaps, math.exp(high)) <= 0:
        return None
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _slope(gaps, math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def _slope(gaps: Floats, inverse: float) -> float:
    """Derivative of the mean loss by 1 / T."""
    return float(np.mean(-gaps * np.exp(-np.logaddexp(0, gaps * inverse))))


def _spread(scores: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the difference of a pair's scores, [B / 2] of means and log-deviations [B, 2]."""
    variances = (2 * scores[:, 1]).exp()
    return (variances[0::2] + variances[1::2]).sqrt()
