"""Losses of pairs: numbers by hand, and what must change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.orpo import Orpo
from rollbook.train.algorithms.preferences import Dpo, Pairs
from rollbook.train.algorithms.rollouts import Rollouts
from rollbook.train.algorithms.simpo import Simpo

MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
"""Two pairs."""


def _orpo(**keys: Any) -> Orpo:
    return Orpo.model_validate({"name": "orpo"} | keys)


def _simpo(**keys: Any) -> Simpo:
    return Simpo.model_validate({"name": "simpo"} | keys)


def _dpo(**keys: Any) -> Dpo:
    return Dpo.model_validate({"name": "dpo"} | keys)


def _inputs(seed: int = 0, mask: torch.Tensor = MASK) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = (-torch.rand(mask.shape, generator=generator).double() for _ in range(2))
    zeros = torch.zeros(mask.shape)
    return LossInputs.whole(logprobs.requires_grad_(), zeros, zeros, mask, reference_logprobs=reference)


def _of_batch(algorithm: Pairs, inputs: LossInputs) -> torch.Tensor:
    """The loss as a step makes it."""
    total = algorithm.add(torch.where(inputs.mask, algorithm.loss(inputs), 0.0), inputs.mask)
    return total / algorithm.divisor(Totals(int(inputs.mask.sum()), int(inputs.mask.any(-1).sum())))


def _plain(inputs: LossInputs, *, mean: bool = False) -> list[float]:
    """The gap of each pair, token by token."""
    assert inputs.reference_logprobs is not None
    ratios = (inputs.logprobs - inputs.reference_logprobs).tolist()
    sums = []
    for row, mask in zip(ratios, inputs.mask.tolist(), strict=True):
        own = [value for value, trained in zip(row, mask, strict=True) if trained]
        sums.append(sum(own) / len(own) if mean else sum(own))
    return [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]


def test_losses_by_hand() -> None:
    """The mean over pairs of each formula."""
    inputs = _inputs()
    gaps = _plain(inputs)
    expected = [math.log1p(math.exp(-0.5 * gap)) for gap in gaps]
    assert _of_batch(_dpo(beta=0.5), inputs).item() == pytest.approx(sum(expected) / 2)
    smoothed = [
        0.9 * loss + 0.1 * math.log1p(math.exp(0.5 * g)) for loss, g in zip(expected, gaps, strict=True)
    ]
    assert _of_batch(_dpo(beta=0.5, label_smoothing=0.1), inputs).item() == pytest.approx(sum(smoothed) / 2)
    squares = [(gap - 1) ** 2 for gap in gaps]
    assert _of_batch(_dpo(beta=0.5, preference_loss="ipo"), inputs).item() == pytest.approx(sum(squares) / 2)
    means = [(gap - 1) ** 2 for gap in _plain(inputs, mean=True)]
    normalized = _dpo(beta=0.5, preference_loss="ipo", length_normalized=True)
    assert _of_batch(normalized, inputs).item() == pytest.approx(sum(means) / 2)
    chosen = [-inputs.logprobs[row][MASK[row]].mean().item() for row in (0, 2)]
    with_sft = [loss + 2 * own for loss, own in zip(expected, chosen, strict=True)]
    assert _of_batch(_dpo(beta=0.5, sft_weight=2.0), inputs).item() == pytest.approx(sum(with_sft) / 2)


def test_losses_without_a_reference_by_hand() -> None:
    """SimPO's margin between mean logprobs, and ORPO's odds beside the cross-entropy of the chosen sample."""
    inputs = _inputs()
    means = [inputs.logprobs[row][MASK[row]].mean().item() for row in range(4)]
    gaps = [means[0] - means[1], means[2] - means[3]]
    expected = [math.log1p(math.exp(1.5 - 3 * gap)) for gap in gaps]
    assert _of_batch(_simpo(beta=3.0, target_margin=1.5), inputs).item() == pytest.approx(sum(expected) / 2)
    odds = [math.log(math.exp(mean) / (1 - math.exp(mean))) for mean in means]
    ratios = [odds[0] - odds[1], odds[2] - odds[3]]
    both = [-m + 0.5 * math.log1p(math.exp(-r)) for m, r in zip((means[0], means[2]), ratios, strict=True)]
    assert _of_batch(_orpo(odds_weight=0.5), inputs).item() == pytest.approx(sum(both) / 2)
    assert _simpo().measures(inputs)["preference_margin"].tolist() == pytest.approx([2 * gap for gap in gaps])
    assert _orpo().measures(inputs)["preference_margin"].tolist() == pytest.approx(ratios)
    for algorithm in (_simpo(), _orpo()):
        measured = algorithm.measures(inputs)["preference_accuracy"].tolist()
        assert measured == [float(gap > 0) for gap in gaps]
        assert algorithm.needs == {"pairs"}


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -1e4])
def test_odds_of_what_is_certain_or_impossible(logprob: float) -> None:
    """Loss and gradient are finite."""
    logprobs = torch.full(MASK.shape, logprob, requires_grad=True)
    zeros = torch.zeros(MASK.shape)
    loss = _of_batch(_orpo(), LossInputs.whole(logprobs, zeros, zeros, MASK))
    (gradient,) = torch.autograd.grad(loss, [logprobs])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_the_gradient_raises_the_chosen_one() -> None:
    """Of trained tokens alone, by beta times the probability that the policy is wrong."""
    inputs = _inputs()
    (gradient,) = torch.autograd.grad(_of_batch(_dpo(beta=0.5), inputs), [inputs.logprobs])
    wrong = [0.5 / (1 + math.exp(0.5 * gap)) / 2 for gap in _plain(inputs)]
    signs = torch.tensor([-wrong[0], wrong[0], -wrong[1], wrong[1]])[:, None] * MASK
    torch.testing.assert_close(gradient, signs.double(), rtol=1e-6, atol=1e-9)


ALONE = (_dpo(), _dpo(preference_loss="ipo"), _dpo(sft_weight=1.0), _simpo(), _orpo())


@given(st.integers(0, 1000), st.sampled_from(ALONE))
def test_nothing_hangs_on_micro_batches_or_masked_tokens(seed: int, algorithm: Pairs) -> None:
    """Pairs in one micro-batch or in two, with padding or other masked tokens: the same sum and gradient."""
    inputs = _inputs(seed)
    whole = _of_batch(algorithm, inputs)
    (gradient,) = torch.autograd.grad(whole, [inputs.logprobs])
    noise = torch.where(MASK, 0.0, 7.5)
    assert inputs.reference_logprobs is not None
    moved = (inputs.logprobs + noise).detach().requires_grad_()
    parts = [
        LossInputs.whole(
            moved[at],
            noise[at],
            noise[at],
            MASK[at],
            reference_logprobs=inputs.reference_logprobs[at] - noise[at],
        )
        for at in (slice(0, 2), slice(2, 4))
    ]
    total = sum((torch.where(p.mask, algorithm.loss(p), 0.0).sum() for p in parts), torch.zeros(())) / 2
    (other,) = torch.autograd.grad(total, [moved])
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(other, gradient)


def test_extremes_stay_finite() -> None:
    """Log-ratios far beyond what exp can take."""
    inputs = _inputs()
    assert inputs.reference_logprobs is not None
    far = LossInputs.whole(
        inputs.logprobs * 1e4,
        inputs.old_logprobs,
        inputs.advantages,
        MASK,
        reference_logprobs=-inputs.logprobs,
    )
    loss = _of_batch(_dpo(beta=10.0), far)
    (gradient,) = torch.autograd.grad(loss, [inputs.logprobs])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_measures() -> None:
    """Which pairs are rated as preferred, and by how much."""
    inputs = _inputs(3)
    gaps = _plain(inputs)
    measures = _dpo(beta=0.5).measures(inputs)
    assert measures["preference_accuracy"].tolist() == [float(gap > 0) for gap in gaps]
    assert measures["preference_margin"].tolist() == pytest.approx([0.5 * gap for gap in gaps])
    assert inputs.reference_logprobs is not None
    ratios = inputs.logprobs - inputs.reference_logprobs
    means = [float(ratio[mask].mean()) for ratio, mask in zip(ratios, inputs.mask, strict=True)]
    assert measures["chosen_logratio"].tolist() == pytest.approx(means[0::2])


def test_what_it_says_of_itself() -> None:
    """Needs, demand and signs, by where pairs come from."""
    recorded, rewarded = _dpo(batch_size=8), _dpo(pairs="rewards", group_size=4)
    assert recorded.needs == {"pairs", "reference"}
    assert rewarded.needs == {"pairs", "groups", "rewards", "reference"}
    assert (recorded.cycles, rewarded.cycles) == (True, False)
    assert (recorded.demand.groups, recorded.demand.group_size, rewarded.demand.group_size) == (8, 2, 4)
    rollouts = Rollouts(np.full(4, np.nan), np.zeros(4, np.int64), np.arange(4), np.ones(4, np.int64))
    assert recorded.advantages(rollouts).values.tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"group_size": 4}, 'belongs to pairs = "rewards"'),
        ({"label_smoothing": 0.1, "preference_loss": "ipo"}, 'belongs to preference_loss = "sigmoid"'),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"beta": 0.0}, "greater than 0"),
        ({"pairs": "guesses"}, "preferences"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], reason: str) -> None:
    """Each is refused, and the message says why."""
    with pytest.raises(ValidationError, match=reason):
        _dpo(**keys)
