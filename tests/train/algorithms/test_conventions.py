"""Keys where peers differ: each by hand, with defaults that keep the numbers of earlier releases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.store.errors import ConfigError
from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Rollouts
from rollbook.train.algorithms.surrogates import estimate


def _algorithm(**keys: Any) -> GroupPolicyGradient:
    algorithm = recorded_algorithm({"name": "policy_gradient"} | keys)
    assert isinstance(algorithm, GroupPolicyGradient)
    return algorithm


def _loss(log_ratio: float, **keys: Any) -> float:
    """Of one token with advantage -1."""
    logprobs, mask = torch.tensor([[log_ratio]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    inputs = LossInputs.whole(logprobs, torch.zeros_like(logprobs), -torch.ones_like(logprobs), mask)
    return float(_algorithm(**keys).loss(inputs))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 20.0),
        ({"log_ratio_bound": 5}, 5.0),
        ({"log_ratio_bound": "none"}, 25.0),
        ({"surrogate": "gspo"}, 10.0),
        ({"surrogate": "gspo", "sequence_log_ratio_bound": 3.0}, 3.0),
        ({"surrogate": "gspo", "sequence_log_ratio_bound": "none"}, 25.0),
        ({"surrogate": "gspo", "log_ratio_bound": 5}, 10.0),
    ],
)
def test_bounds_of_log_ratios(keys: dict[str, Any], expected: float) -> None:
    """A log-ratio of 25: the loss is its exponential, of what it is kept to."""
    assert math.log(_loss(25.0, **keys)) == pytest.approx(expected, rel=1e-12)


def test_cispos_weight_is_bounded_too() -> None:
    """Its clip may be above the bound."""
    for bound, weight in ((2.0, math.exp(2)), ("none", math.exp(3))):
        loss = _loss(3.0, surrogate="cispo", clip_high=1e9, log_ratio_bound=bound)
        assert loss == pytest.approx(weight * 3.0, rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "bound", "expected"),
    [
        ("k1", "k3", [-12.0, 12.0]),
        ("k1", "all", [-10.0, 10.0]),
        ("k2", "k3", [72.0, 72.0]),
        ("k2", "all", [10.0, 10.0]),
        ("k3", "k3", [10.0, 10.0]),
        ("k3", "all", [10.0, 10.0]),
        ("k3", "none", [math.exp(12) - 13, math.exp(-12) + 11]),
        ("k1", "none", [-12.0, 12.0]),
    ],
)
def test_bounds_of_estimates(estimator: str, bound: Any, expected: list[float]) -> None:
    """Of differences of -12 and 12."""
    difference = torch.tensor([[-12.0, 12.0]], dtype=torch.float64)
    assert estimate(estimator, bound, difference)[0].tolist() == pytest.approx(expected, rel=1e-12)


def _rollouts(**given: Any) -> Rollouts:
    """A group of two trajectories, of which the second has two samples, and a trajectory alone."""
    return Rollouts(
        np.array([1.0, 3.0, 3.0, 5.0]),
        np.array([0, 0, 0, 1]),
        np.array([0, 1, 1, 2]),
        np.array([1, 1, 1, 2]),
        **given,
    )


@pytest.mark.parametrize(
    ("keys", "zero", "reward"),
    [
        ({"deviation": "none"}, [-1, 1, 1, 0], [-1, 1, 1, 5]),
        ({"baseline": "leave_one_out", "deviation": "none"}, [-2, 2, 2, 0], [-2, 2, 2, 5]),
        ({"name": "grpo"}, [-(0.5**0.5), 0.5**0.5, 0.5**0.5, 0], [-(0.5**0.5), 0.5**0.5, 0.5**0.5, 5]),
        ({"deviation": "biased"}, [-1, 1, 1, 0], [-1, 1, 1, 5]),
    ],
)
def test_a_group_of_one(keys: dict[str, Any], zero: list[float], reward: list[float]) -> None:
    """Nothing of its reward is left, or all of it."""
    for how, expected in (("zero", zero), ("reward", reward)):
        values = _algorithm(group_of_one=how, **keys).advantages(_rollouts()).values
        assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_kl_penalty_before_the_baseline() -> None:
    """Penalties 1, 0 + 2 of two samples, and 1 + 3, at a tenth each: rewards 0.9, 2.8, 4.6 are compared."""
    old = np.array([1.0, 0.0, 2.0, 1.0, 3.0], np.float32)
    rollouts = _rollouts(old_logprobs=old, reference_logprobs=np.zeros(5, np.float32))
    keys: dict[str, Any] = {"deviation": "none", "reward_kl": 0.1, "group_of_one": "reward"}
    before = _algorithm(**keys, reward_kl_order="before_baseline").advantages(rollouts)
    assert not before.per_token
    assert before.values.tolist() == pytest.approx([-0.95, 0.95, 0.95, 4.6])
    after = _algorithm(**keys).advantages(rollouts)
    assert after.per_token
    assert after.values.tolist() == pytest.approx([-1.1, 1.0, 0.8, 4.6, 4.7])


def test_bounded_penalties() -> None:
    """With every estimate kept within 10, that in the reward is too."""
    rollouts = _rollouts(
        old_logprobs=np.array([15, 0, 0, 0, 0], np.float32), reference_logprobs=np.zeros(5, np.float32)
    )
    keys: dict[str, Any] = {"deviation": "none", "reward_kl": 0.1, "reward_kl_order": "before_baseline"}
    for bound, penalty in (("k3", 1.5), ("all", 1.0)):
        values = _algorithm(**keys, kl_bound=bound).advantages(rollouts).values
        assert values[0] == pytest.approx(((1 - penalty) - 3) / 2)


def test_nothing_to_come_before() -> None:
    """Without a baseline or a deviation there is no order."""
    keys = {"name": "reinforce_plus_plus", "reward_kl": 0.1, "reward_kl_order": "before_baseline"}
    with pytest.raises(ConfigError, match="asks for a baseline or a deviation, and there is neither"):
        fabric.config(fabric.GRPO, algorithm=keys)
    with pytest.raises(ConfigError, match="log_ratio_bound"):
        fabric.config(fabric.GRPO, algorithm={"name": "grpo", "log_ratio_bound": 0.0})
