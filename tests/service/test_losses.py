"""The losses of the service: their values and gradients are those of the formulas, and keys are resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from rollbook.store.errors import RequestError
from rollbook.train.tenants.losses import LOSSES, resolved_keys, token_losses

P = torch.tensor([[-0.2, -1.0, -3.0], [-0.5, -0.1, -2.0]], dtype=torch.float64)
Q = torch.tensor([[-0.9, -1.1, -1.0], [-0.5, -2.0, -2.5]], dtype=torch.float64)
A = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 3.0, -0.3]], dtype=torch.float64)
W = torch.tensor([[1.0, 0.0, 2.0], [0.5, -1.0, 1.0]], dtype=torch.float64)
M = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)


def _gspo(p: torch.Tensor) -> torch.Tensor:
    mean = ((p.detach() - Q) * M).sum(-1, keepdim=True) / 2
    ratio = (mean + p - p.detach()).exp()
    return -torch.min(ratio * A, ratio.clamp(0.7, 1.4) * A)


FORMULAS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda p: -W * p,
    "importance_sampling": lambda p: -(p - Q).exp() * A,
    "ppo": lambda p: -torch.min((p - Q).exp() * A, (p - Q).exp().clamp(0.7, 1.4) * A),
    "cispo": lambda p: -(p - Q).exp().clamp(0.7, 1.4).detach() * p * A,
    "dro": lambda p: -(p * A - 0.5 * 0.3 * (p - Q) ** 2),
    "gspo": _gspo,
}
KEYS = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_its_formula(loss: str) -> None:
    """Each token's value, and the gradient of the sum."""
    mine, theirs = P.clone().requires_grad_(), P.clone().requires_grad_()
    inputs = {"weights": W} if loss == "cross_entropy" else {"logprobs": Q, "advantages": A}
    inputs |= {"sequence_ratio_mask": M} if loss == "gspo" else {}
    values, expected = token_losses(loss, KEYS.get(loss, {}), mine, inputs), FORMULAS[loss](theirs)
    assert torch.allclose(values, expected, rtol=1e-12)
    values.sum().backward()
    expected.sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


def test_tokens_without_weights_weigh_the_same() -> None:
    """As if each had weight 1."""
    assert torch.equal(token_losses("cross_entropy", {}, P, {}), -P)


def test_every_key_is_resolved() -> None:
    """What is not said has its default."""
    assert resolved_keys("ppo", {"clip_high_threshold": 1.5}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.5,
    }
    assert resolved_keys("cross_entropy", {}) == {}


@pytest.mark.parametrize(
    ("loss", "config", "why"),
    [
        ("stable_reinforce", {}, "loss 'stable_reinforce' is not served: use cross_entropy, "),
        ("ppo", {"epsilon": 0.2}, "loss ppo has no key 'epsilon': clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.2}, "loss cross_entropy has no key 'beta': it has none"),
        ("dro", {"beta": "much"}, "key beta of loss dro is 'much': give a number"),
        ("dro", {"beta": float("nan")}, "key beta of loss dro is nan: give a number"),
    ],
)
def test_what_is_not_served_is_named(loss: str, config: dict[str, float | str], why: str) -> None:
    """With what there is instead."""
    with pytest.raises(RequestError, match=why) as error:
        resolved_keys(loss, config)
    assert error.value.status == 400
