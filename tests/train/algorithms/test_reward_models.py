"""Losses of reward models: numbers by hand, gradients, and what must change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollbook.train.algorithms.algorithm import ScoreInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.reward_models import TEMPERATURES, RewardModel, calibration_temperature

SCORES = [1.5, -0.5, 0.25, 1.0, 3.0, 2.0]
"""Of three pairs."""


def _reward_model(**keys: Any) -> RewardModel:
    return RewardModel.model_validate({"name": "reward_model"} | keys)


def _inputs(scores: Any = SCORES, **given: Any) -> ScoreInputs:
    tensor = torch.tensor(scores, dtype=torch.float64)
    if tensor.dim() == 1:
        tensor = tensor[:, None]
    zeros = torch.zeros(len(tensor), dtype=torch.float64)
    tensors = {"margins": zeros, "rewards": zeros} | given
    return ScoreInputs(tensor.requires_grad_(), **tensors)


def _of_batch(algorithm: RewardModel, inputs: ScoreInputs) -> torch.Tensor:
    """The loss as a step makes it."""
    losses = algorithm.score_loss(inputs)
    assert losses.shape == (len(inputs.scores),)
    return losses.sum() / algorithm.divisor(Totals(0, len(inputs.scores)))


def _bt(*gaps: float) -> float:
    return sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(gaps)


def test_losses_by_hand() -> None:
    """The mean over pairs, with each margin and with the centring of each pair."""
    assert _of_batch(_reward_model(), _inputs()).item() == pytest.approx(_bt(2.0, -0.75, 1.0))
    margins = torch.tensor([0.5, 0, 1.0, 0, 0, 0]).double()
    recorded = _of_batch(_reward_model(margin="recorded"), _inputs(margins=margins))
    assert recorded.item() == pytest.approx(_bt(1.5, -1.75, 1.0))
    rewards = torch.tensor([3.0, 1.0, 1.0, 1.0, 5.0, 4.5]).double()
    by_reward = _of_batch(_reward_model(margin="rewards"), _inputs(rewards=rewards, margins=margins))
    assert by_reward.item() == pytest.approx(_bt(0.0, -0.75, 0.5))
    centred = _of_batch(_reward_model(centring=0.1), _inputs())
    assert centred.item() == pytest.approx(_bt(2.0, -0.75, 1.0) + 0.1 * (1 + 1.25**2 + 25) / 3)


@given(st.integers(0, 1000), st.floats(0.01, 10))
def test_sum_to_zero_is_the_square_of_the_mean(seed: int, weight: float) -> None:
    """In value and gradient, from micro-batches that know no more than the mean of all."""
    scores = torch.randn(8, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
    algorithm = _reward_model(batch_sum_to_zero=weight)
    mean = scores.detach().mean().item()
    zeros = torch.zeros(4, dtype=torch.float64)
    parts = [
        algorithm.score_loss(ScoreInputs(scores[at, None], zeros, zeros, mean))
        for at in (slice(0, 4), slice(4, 8))
    ]
    loss = torch.cat(parts).sum() / 4
    whole = (
        _of_batch(_reward_model(), _inputs(scores.detach().tolist())) + weight * scores.detach().mean() ** 2
    )
    torch.testing.assert_close(loss, whole)
    (gradient,) = torch.autograd.grad(loss, [scores])
    again = scores.detach().clone().requires_grad_()
    gaps = again[0::2] - again[1::2]
    plain = torch.nn.functional.softplus(-gaps).mean() + weight * again.mean() ** 2
    (expected,) = torch.autograd.grad(plain, [again])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("mean", "logs"), [(0.0, 0.0), (1.3, -1.0), (-2.0, 0.7), (4.0, 3.0)])
def test_uncertain_scores_by_integration(mean: float, logs: float) -> None:
    """The mean of the sigmoid over a fine grid of the normal distribution."""
    inputs = _inputs([[mean + 0.4, logs], [0.4, logs - 0.5]])
    deviation = math.hypot(math.exp(logs), math.exp(logs - 0.5))
    z = np.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001)
    density = np.exp(-((z - mean) ** 2) / (2 * deviation**2)) / (deviation * math.sqrt(2 * math.pi))
    expected = -math.log(np.trapezoid(density / (1 + np.exp(-z)), z))
    assert _of_batch(_reward_model(head="mean_deviation"), inputs).item() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(
        lambda scores: _reward_model(head="mean_deviation").score_loss(replace(inputs, scores=scores)),
        inputs.scores,
    )


def test_no_deviation_is_bradley_terry() -> None:
    """A distribution without any width has the loss of its mean."""
    wide = _inputs([[score, -30.0] for score in SCORES])
    narrow = _of_batch(_reward_model(head="mean_deviation"), wide)
    assert narrow.item() == pytest.approx(_bt(2.0, -0.75, 1.0))


def test_extremes_stay_finite() -> None:
    """Scores far beyond what exp can take."""
    for head, scores in (
        ("score", [1e6, -1e6, -1e6, 1e6]),
        ("mean_deviation", [[1e4, 5.0], [-1e4, 5.0]] * 2),
    ):
        inputs = _inputs(scores)
        loss = _of_batch(_reward_model(head=head), inputs)
        (gradient,) = torch.autograd.grad(loss, [inputs.scores])
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_measures() -> None:
    """Of pairs their order and difference, of samples their scores."""
    measures = _reward_model().score_measures(_inputs())
    assert measures["preference_accuracy"].tolist() == [1.0, 0.0, 1.0]
    assert measures["preference_margin"].tolist() == [2.0, -0.75, 1.0]
    assert measures["score_mean"].tolist() == SCORES
    assert "score_deviation" not in measures
    uncertain = _reward_model(head="mean_deviation").score_measures(_inputs([[1.0, 0.0], [2.0, math.log(3)]]))
    assert uncertain["score_deviation"].tolist() == pytest.approx([1.0, 3.0])


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=30), st.floats(0.1, 10))
@example([1.25, 1.25, 1.5625, 3.6875, 4.5, 4.625, -2.8125, -4.75, -4.5625, -4.6875], 1.0)
def test_temperatures(gaps: list[float], scale: float) -> None:
    """No other temperature has less loss; scores times a number are calibrated by that number more; there is
    none where the least loss is beyond the bounds, as where all pairs are rated right."""
    values = np.array(gaps)
    fitted = calibration_temperature(values)

    def loss(temperature: float) -> float:
        return float(np.logaddexp(0, -values / temperature).mean())

    if fitted is None:
        first, *between, last = (loss(candidate) for candidate in np.geomspace(*TEMPERATURES, 200))
        assert min(between) >= min(first, last) - 1e-12
        return
    assert all(loss(fitted) <= loss(fitted * factor) + 1e-12 for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    if 0.02 < fitted < 50:
        scaled = calibration_temperature(values * scale)
        assert scaled is not None
        assert scaled == pytest.approx(fitted * scale, rel=1e-6)


def test_a_temperature_by_hand() -> None:
    """Two of three pairs right by the same gap: the sigmoid of gap over T must be two thirds."""
    temperature = calibration_temperature(np.array([3.0, 3.0, -3.0]))
    assert temperature == pytest.approx(3.0 / math.log(2))
    assert calibration_temperature(np.array([1.0, 2.0])) is None
    assert calibration_temperature(np.array([1.0, -1.0])) is None


def test_what_it_says_of_itself() -> None:
    """Needs and the width of its head, by its keys."""
    assert (_reward_model().needs, _reward_model().head_width) == ({"pairs"}, 1)
    assert _reward_model(head="mean_deviation").head_width == 2
    assert _reward_model(margin="recorded", batch_sum_to_zero=1.0).needs == {
        "pairs",
        "margins",
        "batch_score",
    }
    assert _reward_model(margin="rewards").needs == {"pairs", "rewards"}
    assert _reward_model(pairs="rewards").needs == {"pairs", "groups", "rewards"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pairs": "rewards", "margin": "recorded"}, 'belongs to pairs = "preferences"'),
        ({"batch_sum_to_zero": -1}, "greater than or equal to 0"),
        ({"head": "three"}, "mean_deviation"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], reason: str) -> None:
    """Each is refused, and the message says why."""
    with pytest.raises(ValidationError, match=reason):
        _reward_model(**keys)
