"""Surrogates, held against scalar code in float64, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.algorithms.surrogates import SURROGATES, Clips

CLIPS = Clips(0.2, 0.3, beta=0.7)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**31))


def _inputs(rows: int, columns: int, seed: int) -> LossInputs:
    """Random inputs in float64; every row trains at least one token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[:, 0] = True
    logprobs = (-normal(rows, columns).abs()).requires_grad_()
    old = logprobs.detach() + 0.4 * normal(rows, columns)
    return LossInputs.whole(logprobs, old, normal(rows, 1).expand(rows, columns), mask)


def _values(inputs: LossInputs) -> list[list[tuple[float, float, float]]]:
    """(logprob, old logprob, advantage) of each trained token, row by row."""
    triples = zip(inputs.logprobs.detach(), inputs.old_logprobs, inputs.advantages, inputs.mask, strict=True)
    return [
        [(float(a), float(b), float(c)) for a, b, c, masked in zip(*row, strict=True) if masked]
        for row in triples
    ]


def _ppo(ratio: float, advantage: float, clips: Clips) -> float:
    clipped = min(max(ratio, 1 - clips.low), 1 + clips.high)
    loss = max(-ratio * advantage, -clipped * advantage)
    return min(loss, -clips.dual * advantage) if clips.dual and advantage < 0 else loss


def _expected(name: str, row: list[tuple[float, float, float]], clips: Clips) -> list[float]:
    mean = math.exp(sum(new - old for new, old, _ in row) / len(row))
    if name == "reinforce":
        return [-a * new for new, _, a in row]
    if name == "dro":
        return [clips.beta / 2 * (new - old) ** 2 - a * new for new, old, a in row]
    if name == "cispo":
        weights = [min(max(math.exp(new - old), 1 - clips.low), 1 + clips.high) for new, old, _ in row]
        return [-w * a * new for w, (new, _, a) in zip(weights, row, strict=True)]
    ratios = [mean if name == "gspo" else math.exp(new - old) for new, old, _ in row]
    return [_ppo(r, a, clips) for r, (_, _, a) in zip(ratios, row, strict=True)]


@given(SHAPES, st.sampled_from([CLIPS, Clips(0.2, 0.3, 1.5), Clips(1.0, 0.2), Clips(0.0, 0.0)]))
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce", "dro"])
def test_values_are_those_of_scalar_code(name: str, shape: tuple[int, int, int], clips: Clips) -> None:
    """Every surrogate, with and without dual clip, over random ratios."""
    inputs = _inputs(*shape)
    losses = SURROGATES[name](inputs, clips)
    for loss, mask, row in zip(losses, inputs.mask, _values(inputs), strict=True):
        assert loss[mask].tolist() == pytest.approx(_expected(name, row, clips), rel=1e-12, abs=1e-12)


@given(SHAPES)
@settings(max_examples=20)
@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "dro"])
def test_gradients_are_the_derivatives(name: str, shape: tuple[int, int, int]) -> None:
    """Against finite differences; a point at a kink has probability 0."""
    inputs = _inputs(*shape)

    def losses(logprobs: torch.Tensor) -> torch.Tensor:
        perturbed = LossInputs.whole(logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask)
        return SURROGATES[name](perturbed, Clips(0.2, 0.3, 3.0))

    assert torch.autograd.gradcheck(losses, (inputs.logprobs,))


def _gradient(loss: torch.Tensor, inputs: LossInputs) -> Any:
    [gradient] = torch.autograd.grad(loss, [inputs.logprobs])
    return gradient


@given(SHAPES)
def test_gspos_gradient_is_that_of_the_sequence_objective(shape: tuple[int, int, int]) -> None:
    """The mean over a sample's tokens has the gradient of min(s A, clip(s) A), s the geometric mean ratio."""
    inputs = _inputs(*shape)
    algorithm = PolicyGradient(name="policy_gradient", surrogate="gspo", normalizer="sequence_mean")
    gradient = _gradient(
        algorithm.add(torch.where(inputs.mask, algorithm.loss(inputs), 0.0), inputs.mask), inputs
    )
    log_ratio = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    ratio = (log_ratio.sum(-1) / inputs.mask.sum(-1)).exp()
    advantages = inputs.advantages[:, 0]
    clipped = ratio.clamp(0.8, 1.2)
    expected = _gradient(-(ratio * advantages).minimum(clipped * advantages).sum(), inputs)
    assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-12)


@given(SHAPES)
def test_cispos_gradient_is_the_clipped_weight(shape: tuple[int, int, int]) -> None:
    """-clip(r) A for each token, clipped or not."""
    inputs = _inputs(*shape)
    gradient = _gradient(SURROGATES["cispo"](inputs, CLIPS).sum(), inputs)
    weights = (inputs.logprobs - inputs.old_logprobs).exp().clamp(0.8, 1.3)
    assert torch.allclose(gradient, -weights.detach() * inputs.advantages, rtol=1e-12)


@given(SHAPES)
@pytest.mark.parametrize("name", SURROGATES)
def test_masked_tokens_have_no_effect(name: str, shape: tuple[int, int, int]) -> None:
    """Neither on the values of trained tokens, nor on their gradients."""
    inputs = _inputs(*shape)
    other = torch.where(inputs.mask, inputs.logprobs, inputs.logprobs - 3).detach().requires_grad_()
    changed = LossInputs.whole(other, inputs.old_logprobs + ~inputs.mask, inputs.advantages, inputs.mask)
    results = []
    for batch in (inputs, changed):
        losses = torch.where(batch.mask, SURROGATES[name](batch, CLIPS), 0.0)
        results.append((losses.detach(), _gradient(losses.sum(), batch)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[0][1][~inputs.mask].any()


@pytest.mark.parametrize("name", SURROGATES)
def test_extreme_ratios_are_finite(name: str) -> None:
    """Log-ratios of a thousand overflow nothing."""
    logprobs = torch.tensor([[-1000.0, -1.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1000.0]]), torch.ones(1, 2, dtype=torch.bool)
    for advantage in (1.0, -1.0):
        inputs = LossInputs.whole(logprobs, old, torch.full((1, 2), advantage), mask)
        losses = SURROGATES[name](inputs, CLIPS)
        assert losses.isfinite().all()
        assert _gradient(losses.sum(), inputs).isfinite().all()
