"""Whoever permutes the samples of a rollout batch permutes its advantages, by every estimator and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.algorithms.advantages import BASELINES
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import ALGORITHMS, recorded_algorithm
from rollbook.train.algorithms.rollouts import Rollouts

NAMES = [name for name, kind in ALGORITHMS.items() if issubclass(kind, GroupPolicyGradient)]
KEYS: list[dict[str, Any]] = [
    {},
    {"turn_rewards": True},
    {"discount": 0.9},
    {"discount": 0.9, "discount_unit": "turn", "turn_rewards": True},
    {"reward_kl": 0.2},
    {"reward_kl": 0.2, "kl_bound": "all"},
    {"truncated_reward": 0.5},
    {"overlong_length": 5, "overlong_buffer": 4},
    {"reward_clip": [-0.5, 0.5]},
    {"reward_normalization": "batch"},
    {"reward_normalization": "batch", "reward_moments_of": "samples"},
    {"reward_normalization": "running", "reward_moments": [5, 0.5, 2.0]},
    {"group_of_one": "reward"},
    {"whitening": "mean"},
    {"whitening": "biased"},
    {"whitening": "unbiased", "discount": 0.5},
]
COMBINED: list[dict[str, Any]] = [
    {"name": "policy_gradient", "baseline": baseline, "deviation": deviation} | keys
    for baseline in BASELINES
    for deviation in ("unbiased", "biased", "none")
    for keys in ({}, {"reward_kl": 0.2, "reward_kl_order": "before_baseline"})
    if (baseline, deviation) != ("none", "none") or not keys
]


def _rollouts(seed: int) -> Rollouts:
    """Up to twelve samples of groups of any size, some trajectories of several samples, some tokens none."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 13))
    names = random.integers(0, 6, count)
    rewards = random.normal(size=6)
    lengths = random.integers(0, 5, count)
    total = int(lengths.sum())
    return Rollouts(
        rewards=rewards[names],
        groups=names % 3,
        trajectories=names,
        lengths=lengths,
        truncated=random.random(count) < 0.3,
        turn_rewards=random.normal(size=total),
        old_logprobs=(8 * random.normal(size=total)).astype(np.float32),
        reference_logprobs=random.normal(size=total).astype(np.float32),
        values=random.normal(size=total).astype(np.float32),
        number_turns=lambda: np.concatenate([np.zeros(0, np.int64), *(np.arange(n) // 2 for n in lengths)]),
    )


def _tokens(rollouts: Rollouts, order: Any) -> Any:
    """Where the tokens are of samples in another order."""
    ends = np.cumsum(rollouts.lengths)
    pieces = [np.arange(ends[i] - rollouts.lengths[i], ends[i]) for i in order]
    return np.concatenate([np.zeros(0, np.int64), *pieces])


def _permuted(rollouts: Rollouts, order: Any) -> Rollouts:
    at, turns = _tokens(rollouts, order), rollouts.turns
    assert turns is not None
    tokens = ("turn_rewards", "old_logprobs", "reference_logprobs", "values")
    return replace(
        rollouts,
        groups=rollouts.groups[order],
        trajectories=rollouts.trajectories[order],
        **{name: getattr(rollouts, name)[order] for name in ("rewards", "lengths", "truncated")},
        **{name: getattr(rollouts, name)[at] for name in tokens},
        number_turns=lambda: turns[at],
    )


def _check(values: dict[str, Any], seed: int) -> None:
    algorithm, rollouts = recorded_algorithm(values), _rollouts(seed)
    order = np.random.default_rng(seed + 1).permutation(len(rollouts.lengths))
    advantages, other = algorithm.advantages(rollouts), algorithm.advantages(_permuted(rollouts, order))
    at = _tokens(rollouts, order)
    assert advantages.per_token == other.per_token
    assert np.isfinite(advantages.values).all()
    expected = advantages.values[at if advantages.per_token else order]
    assert other.values == pytest.approx(expected, rel=1e-7, abs=1e-7)
    assert (advantages.returns is None) == (other.returns is None)
    if advantages.returns is not None and other.returns is not None:
        assert other.returns == pytest.approx(advantages.returns[at], rel=1e-7, abs=1e-7)


@given(st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_of_every_algorithm(keys: dict[str, Any], seed: int) -> None:
    """With each key that has a part in advantages."""
    for name in NAMES:
        _check({"name": name} | keys, seed)


@given(st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("values", COMBINED, ids=str)
def test_of_every_combination(values: dict[str, Any], seed: int) -> None:
    """Of baseline and deviation, and with the KL penalty before them."""
    _check(values, seed)
