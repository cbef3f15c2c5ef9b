"""KTO's loss of labelled samples: against numbers by hand, and free of how a batch is divided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.kto import Kto
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.rollouts import Rollouts

MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
REWARDS = np.array([1.0, 0.0, -2.0, 0.5])
"""The first and the last sample are desirable."""


def _kto(**keys: Any) -> Kto:
    return Kto.model_validate({"name": "kto"} | keys)


def _labels(algorithm: Kto, rewards: Any = REWARDS) -> list[float]:
    numbers = np.arange(len(rewards))
    rollouts = Rollouts(np.asarray(rewards, np.float64), numbers, numbers, np.ones(len(rewards), np.int64))
    return algorithm.advantages(rollouts).values.tolist()


def _inputs(algorithm: Kto, seed: int = 0, point: float = 0.25) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = (-torch.rand(MASK.shape, generator=generator).double() - 0.1 for _ in range(2))
    labels = torch.tensor(_labels(algorithm)).double()[:, None].expand(MASK.shape)
    inputs = LossInputs.whole(
        logprobs.requires_grad_(), logprobs.detach(), labels, MASK, reference_logprobs=reference
    )
    return replace(inputs, kl_reference=point)


def _of_batch(algorithm: Kto, inputs: LossInputs) -> torch.Tensor:
    """The loss as a step makes it."""
    total = algorithm.add(torch.where(inputs.mask, algorithm.loss(inputs), 0.0), inputs.mask)
    return total / algorithm.divisor(Totals(int(inputs.mask.sum()), int(inputs.mask.any(-1).sum())))


def _sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _ratios(inputs: LossInputs) -> list[float]:
    assert inputs.reference_logprobs is not None
    gaps = inputs.logprobs - inputs.reference_logprobs
    return [gaps[row][MASK[row]].sum().item() for row in range(4)]


def test_the_loss_by_hand() -> None:
    """1 - sigma of beta times how far the log-ratio is beyond the point of reference, on the right side."""
    keys = {"beta": 2.0, "desirable_weight": 0.5, "undesirable_weight": 1.5}
    inputs = _inputs(_kto(**keys), point=0.25)
    r = _ratios(inputs)
    good = [0.5 * (1 - _sigma(2 * (ratio - 0.25))) for ratio in (r[0], r[3])]
    bad = [1.5 * (1 - _sigma(2 * (0.25 - ratio))) for ratio in (r[1], r[2])]
    assert _of_batch(_kto(**keys), inputs).item() == pytest.approx(sum(good + bad) / 4)
    zero = _kto(beta=2.0, reference_point="zero")
    expected = [_sigma(-2 * r[0]), _sigma(2 * r[1]), _sigma(2 * r[2]), _sigma(-2 * r[3])]
    assert _of_batch(zero, replace(inputs, kl_reference=None)).item() == pytest.approx(sum(expected) / 4)


def test_what_is_measured() -> None:
    """Each sample's side of the point of reference, and implicit rewards of both kinds."""
    algorithm = _kto(beta=2.0)
    inputs = _inputs(algorithm, point=0.1)
    r, measured = _ratios(inputs), algorithm.measures(inputs)
    right = [r[0] > 0.1, r[1] < 0.1, r[2] < 0.1, r[3] > 0.1]
    assert measured["label_accuracy"].tolist() == [float(side) for side in right]
    assert 0 < sum(right) < 4, "both happen"
    assert measured["desirable_rating"].tolist() == pytest.approx([2 * r[0], 2 * r[3]])
    assert measured["undesirable_rating"].tolist() == pytest.approx([2 * r[1], 2 * r[2]])
    assert measured["kl_reference"].tolist() == pytest.approx([0.1] * 4)


def test_labels() -> None:
    """By reward above a bound, or by the place in a pair."""
    assert _labels(_kto()) == [1, -1, -1, 1]
    assert _labels(_kto(desirable_above=0.5)) == [1, -1, -1, -1]
    assert _labels(_kto(desirable_above=-2.0)) == [1, 1, -1, 1]
    assert _labels(_kto(labels="preferences"), [0, 9, np.nan, np.nan]) == [1, -1, 1, -1]


def test_the_gradient_raises_desirable_samples_alone() -> None:
    """Of trained tokens: beta times sigma (1 - sigma) of a sample, the same for all of its tokens."""
    algorithm = _kto(beta=0.5)
    inputs = _inputs(algorithm)
    (gradient,) = torch.autograd.grad(_of_batch(algorithm, inputs), [inputs.logprobs])
    slopes = [0.5 * _sigma(0.5 * (r - 0.25)) * (1 - _sigma(0.5 * (r - 0.25))) / 4 for r in _ratios(inputs)]
    signs = torch.tensor([-1.0, 1.0, 1.0, -1.0]).double()
    expected = (signs * torch.tensor(slopes))[:, None] * MASK
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@given(st.integers(0, 1000), st.sampled_from([{}, {"reference_point": "zero"}, {"desirable_weight": 0.2}]))
def test_nothing_hangs_on_micro_batches_or_masked_tokens(seed: int, keys: dict[str, Any]) -> None:
    """Samples in one micro-batch or in two, other masked tokens: the same sum and gradient."""
    algorithm = _kto(**keys)
    inputs = _inputs(algorithm, seed)
    whole = _of_batch(algorithm, inputs)
    (gradient,) = torch.autograd.grad(whole, [inputs.logprobs])
    noisy = (inputs.logprobs.detach() + torch.where(MASK, 0.0, 7.5)).requires_grad_()
    assert inputs.reference_logprobs is not None
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = LossInputs.whole(
            noisy[rows],
            noisy[rows].detach(),
            inputs.advantages[rows],
            MASK[rows],
            reference_logprobs=inputs.reference_logprobs[rows],
            kl_reference=inputs.kl_reference,
        )
        parts.append(torch.where(MASK[rows], algorithm.loss(part), 0.0).sum() / 4)
    torch.testing.assert_close(sum(parts), whole)
    (again,) = torch.autograd.grad(sum(parts), [noisy])  # type: ignore[arg-type]
    torch.testing.assert_close(again, gradient)


def test_what_it_needs() -> None:
    """Mismatched completions only for their divergence; rewards, or pairs."""
    assert _kto().needs == {"rewards", "reference", "mismatched_kl"}
    assert _kto(reference_point="zero").needs == {"rewards", "reference"}
    assert _kto(labels="preferences").needs == {"pairs", "reference", "mismatched_kl"}
    assert (_kto().cycles, _kto().reference, _kto(batch_size=7).demand.groups) == (True, 0, 7)
    assert (_kto().adapts, _kto(ref_update_interval=3).reference_interval) == (False, 3)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"labels": "preferences", "desirable_above": 1.0}, 'desirable_above belongs to labels = "rewards"'),
        ({"batch_size": 1}, 'take more samples, or set reference_point = "zero"'),
        ({"desirable_weight": -1}, "greater than or equal to 0"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], text: str) -> None:
    """They are refused, with what to do."""
    with pytest.raises(ValidationError, match=text):
        _kto(**keys)
    assert _kto(batch_size=1, reference_point="zero").demand.groups == 1
