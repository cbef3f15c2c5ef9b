"""KL estimates and entropies, held against the divergences and entropies of whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from rollbook.train.algorithms.surrogates import KL_ESTIMATORS
from rollbook.train.step.predictions import entropies, log_distributions


def _distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two near distributions over seven tokens, as log-probabilities in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64)
    other = logits + 0.1 * torch.randn(7, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), other.log_softmax(-1)


def test_by_hand() -> None:
    """d = ln 2."""
    difference = torch.tensor([math.log(2)], dtype=torch.float64)
    values = {name: float(estimator(difference)) for name, estimator in KL_ESTIMATORS.items()}
    assert values == pytest.approx(
        {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}, rel=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_expectations_are_the_divergence(seed: int) -> None:
    """Over all tokens, k1 and k3 come to KL(policy || reference) exactly, and k2 nearly."""
    policy, reference = _distributions(seed)
    divergence = float((policy.exp() * (policy - reference)).sum())
    for name, estimator in KL_ESTIMATORS.items():
        expectation = float((policy.exp() * estimator(policy - reference)).sum())
        assert expectation == pytest.approx(divergence, rel=0.2 if name == "k2" else 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_k2_is_that_of_the_divergence(seed: int) -> None:
    """On policy: sum of p * grad(k2) over all tokens equals the gradient of KL in the logits."""
    policy, reference = _distributions(seed)
    logits = policy.detach().requires_grad_()
    logprobs = logits.log_softmax(-1)
    weighted = (policy.exp() * KL_ESTIMATORS["k2"](logprobs - reference)).sum()
    [gradient] = torch.autograd.grad(weighted, [logits])
    again = logits.log_softmax(-1)
    [expected] = torch.autograd.grad((again.exp() * (again - reference)).sum(), [logits])
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_k3_is_bounded_and_never_negative() -> None:
    """Differences of a thousand give at most 10, as in verl; near zero it stays above zero."""
    far = KL_ESTIMATORS["k3"](torch.tensor([-1000.0, -30.0, 30.0, 1000.0]))
    assert far.tolist() == [10.0, 10.0, 10.0, 10.0]
    near = KL_ESTIMATORS["k3"](torch.linspace(-1, 1, 101, dtype=torch.float64))
    assert float(near.min()) >= -1e-15


def test_entropies() -> None:
    """ln 2 of a fair coin, 0 of a certain one; the temperature makes it fairer."""
    logits = torch.tensor([[[0.0, 0.0], [1000.0, 0.0], [2.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    temperatures = torch.tensor([[1.0, 1.0, 1.0, 2.0]])
    values = entropies(log_distributions(logits, temperatures))
    chance = math.e / (math.e + 1)
    expected = [math.log(2), 0.0, -(chance * math.log(chance) + (1 - chance) * math.log(1 - chance))]
    assert values[0].tolist() == pytest.approx(expected, abs=1e-6)
