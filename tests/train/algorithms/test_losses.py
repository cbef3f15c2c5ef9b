"""Losses, held against values worked out by hand and against plain scalar code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.sft import Sft
from rollbook.train.step.predictions import token_logprobs

ALGORITHM = Grpo(name="grpo", clip_low=0.2, clip_high=0.3)


def _grpo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, algorithm: Grpo = ALGORITHM
) -> torch.Tensor:
    return algorithm.loss(
        LossInputs.whole(logprobs, old, advantages, torch.ones_like(logprobs, dtype=torch.bool))
    )


def _surrogate(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    """PPO's clipped surrogate of one token, as the paper writes it."""
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, clipped * advantage)


def test_token_logprobs_by_hand() -> None:
    """Two tokens with logits ln 3 and 0: probabilities 3/4 and 1/4."""
    logits = torch.tensor([[[math.log(3), 0.0], [math.log(3), 0.0], [9.0, 9.0]]])
    logprobs = token_logprobs(logits, torch.tensor([[0, 0, 1]]), torch.ones(1, 3))
    assert logprobs.tolist() == [pytest.approx([math.log(0.75), math.log(0.25)], rel=1e-6)]


def test_a_token_uses_its_own_temperature_and_the_logits_before_it() -> None:
    """Position t is about token t + 1: its temperature, and the logits at t, as log-softmax by hand."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    temperatures = torch.rand(2, 5) + 0.3
    logprobs = token_logprobs(logits, tokens, temperatures)
    assert logprobs.shape == (2, 4)
    assert logprobs.dtype == torch.float32
    for b in range(2):
        for t in range(4):
            scaled = [float(x) / float(temperatures[b, t + 1]) for x in logits[b, t]]
            expected = scaled[int(tokens[b, t + 1])] - math.log(sum(math.exp(x) for x in scaled))
            assert float(logprobs[b, t]) == pytest.approx(expected, abs=2e-6)


def test_sft_loss_is_the_cross_entropy() -> None:
    """The loss of each token is minus its log-probability; it equals torch's cross-entropy."""
    torch.manual_seed(1)
    logits, tokens = torch.randn(1, 4, 6), torch.randint(0, 6, (1, 4))
    logprobs = token_logprobs(logits, tokens, torch.ones(1, 4))
    losses = Sft(name="sft").loss(LossInputs.whole(logprobs, logprobs, logprobs, logprobs > 0))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
    assert torch.allclose(losses[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.6),  # clipped above: 1.3 * 2
        (0.5, 2.0, -1.0),  # a good token made unlikely is not clipped
        (0.5, -2.0, 1.6),  # clipped below: 0.8 * -2
        (1.5, -2.0, 3.0),  # a bad token made likely is not clipped
        (1.1, -1.0, 1.1),
        (7.0, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, expected: float) -> None:
    """The surrogate with bounds 0.8 and 1.3, on every side of them."""
    loss = _grpo(torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]))
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@given(
    st.floats(-8, 0),
    st.floats(-8, 0),
    st.floats(-5, 5),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(max_examples=300)
def test_surrogate_equals_the_scalar_one(
    logprob: float, old: float, advantage: float, low: float, high: float
) -> None:
    """For any numbers it is what plain scalar code gives."""
    algorithm = Grpo(name="grpo", clip_low=low, clip_high=high)
    values = [torch.tensor([[x]], dtype=torch.float64) for x in (logprob, old, advantage)]
    loss = float(_grpo(*values, algorithm))
    assert loss == pytest.approx(_surrogate(logprob, old, advantage, low, high), rel=1e-9, abs=1e-12)


def test_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    """Where the policy is the one that sampled, the gradient is -A * grad logprob, exactly."""
    torch.manual_seed(2)
    logits, tokens = torch.randn(1, 6, 9, dtype=torch.float64), torch.randint(0, 9, (1, 6))
    advantages = torch.tensor([[1.5, -0.5, 0.0, 2.0, -3.0]], dtype=torch.float64)

    def logprobs_of(held: torch.Tensor) -> torch.Tensor:
        return held[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)

    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs = logprobs_of(leaf)
    _grpo(logprobs, logprobs.detach(), advantages).sum().backward()
    (-advantages * logprobs_of(other)).sum().backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert torch.allclose(leaf.grad, other.grad, rtol=0, atol=1e-15)
    assert float(leaf.grad.abs().max()) > 0.1


@pytest.mark.parametrize(("ratio", "advantage", "flows"), [(1.5, 1.0, 0), (0.5, -1.0, 0), (0.5, 1.0, 1)])
def test_clipped_tokens_have_no_gradient(ratio: float, advantage: float, flows: int) -> None:
    """Beyond the bound, in the direction of improvement, nothing pulls on the token any more."""
    logprob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    _grpo(logprob, torch.zeros(1, 1), torch.tensor([[advantage]])).backward()
    assert logprob.grad is not None
    assert (float(logprob.grad) != 0) == bool(flows)
