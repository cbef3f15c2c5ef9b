"""KL coefficients that follow a target, and moments of rewards."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollbook.train.algorithms.policy_gradient import Moments, adapted
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Rollouts

REWARDS = st.lists(st.floats(-100, 100), max_size=20).map(np.array)


def _algorithm(**keys: Any) -> Any:
    return recorded_algorithm({"name": "rloo"} | keys)


def _metrics(**values: Any) -> dict[str, Any]:
    rewards = {"trajectories": 32, "trajectory_reward": 1.0, "trajectory_reward_std": 0.5}
    return {"samples": 64, "reward": 9.0, "reward_std": 7.0, "kl": None} | rewards | values


def test_a_coefficient_follows_its_target() -> None:
    """Up where the divergence is above, down where it is below, by a fifth of the share of the horizon."""
    assert adapted(0.1, 6.0, 6.0, 64, 10_000) == 0.1
    assert adapted(0.1, 6.6, 6.0, 64, 1_000) == pytest.approx(0.1 * (1 + 0.1 * 0.064))
    assert adapted(0.1, 600.0, 6.0, 500, 1_000) == pytest.approx(0.11)
    assert adapted(0.1, 0.0, 6.0, 500, 1_000) == pytest.approx(0.09)


@given(REWARDS, REWARDS)
def test_moments_of_parts_are_those_of_the_whole(one: Any, other: Any) -> None:
    """In any order, of empty parts too."""
    whole = np.concatenate([one, other])
    moments = Moments.of(one).with_more(Moments.of(other))
    assert moments.count == len(whole)
    if len(whole):
        assert (moments.mean, moments.variance) == pytest.approx(
            (whole.mean(), whole.var()), rel=1e-9, abs=1e-7
        )


def test_keys_after_a_step() -> None:
    """What adapts, and nothing else; what a manifest holds is read back."""
    fixed = _algorithm(kl=0.1, reward_normalization="batch")
    assert (fixed.adapts, fixed.after(_metrics(kl=9.0)) is fixed) == (False, True)
    moving = _algorithm(kl=0.1, reward_kl=0.2, kl_target=3.0, kl_horizon=640, reward_normalization="running")
    then = moving.after(_metrics(kl=9.0))
    assert moving.adapts
    assert (then.kl, then.reward_kl) == (pytest.approx(0.102), pytest.approx(0.204))
    assert then.reward_moments == (32, 1.0, 0.25)
    again = recorded_algorithm(then.model_dump(mode="json"))
    assert again == then
    assert again.after(_metrics(trajectory_reward=3.0)).reward_moments == (64, 2.0, 1.25)
    assert again.after(_metrics()).kl == then.kl, "no divergence was measured"


def test_normalized_rewards() -> None:
    """By the batch, or by all rewards so far with these among them; penalties and clips come after."""
    rewards = np.array([0.0, 2.0, 4.0, 6.0])
    rollouts = Rollouts(rewards, np.zeros(4, np.int64), np.arange(4), np.ones(4, np.int64))
    keys: dict[str, Any] = {"baseline": "none", "deviation": "none"}
    by_batch = _algorithm(**keys, reward_normalization="batch").advantages(rollouts).values
    assert by_batch.tolist() == pytest.approx(((rewards - 3) / np.sqrt(5)).tolist())
    seen = np.array([10.0, 20.0])
    running = _algorithm(
        **keys, reward_normalization="running", reward_moments=list(astuple(Moments.of(seen)))
    )
    everything = np.concatenate([seen, rewards])
    expected = (rewards - everything.mean()) / everything.std()
    assert running.advantages(rollouts).values.tolist() == pytest.approx(expected.tolist())
    clipped = (
        _algorithm(**keys, reward_normalization="batch", reward_clip=[-1, 1]).advantages(rollouts).values
    )
    assert clipped.tolist() == pytest.approx([-1, -1 / np.sqrt(5), 1 / np.sqrt(5), 1])
    equal = Rollouts(np.ones(4), np.zeros(4, np.int64), np.arange(4), np.ones(4, np.int64))
    assert _algorithm(**keys, reward_normalization="batch").advantages(equal).values.tolist() == [0.0] * 4


@pytest.mark.parametrize(("of", "mean"), [("trajectories", 3.0), ("samples", 2.0)])
def test_a_trajectory_counts_once_however_many_samples_it_has(of: str, mean: float) -> None:
    """Three samples of one trajectory with reward 1, and one of another with 5: the mean is 3, and the
    deviation 2; of samples, as earlier releases counted, it is 2."""
    rewards = np.array([1.0, 1.0, 5.0, 1.0])
    rollouts = Rollouts(rewards, np.zeros(4, np.int64), np.array([0, 0, 1, 0]), np.ones(4, np.int64))
    keys: dict[str, Any] = {"baseline": "none", "deviation": "none", "reward_moments_of": of}
    by_batch = _algorithm(**keys, reward_normalization="batch").advantages(rollouts).values
    spread = 2.0 if of == "trajectories" else np.sqrt(3.0)
    assert by_batch.tolist() == pytest.approx(((rewards - mean) / spread).tolist())
    moving = _algorithm(**keys, reward_normalization="running").after(_metrics())
    assert moving.reward_moments == ((32, 1.0, 0.25) if of == "trajectories" else (64, 9.0, 49.0))


def test_manifests_of_earlier_releases_count_samples() -> None:
    """They have all keys of then, and not the one that says what is counted."""
    now = _algorithm(reward_normalization="running").model_dump(mode="json")
    then = {key: value for key, value in now.items() if key != "reward_moments_of"}
    assert recorded_algorithm(now).reward_moments_of == "trajectories"
    assert recorded_algorithm(then).reward_moments_of == "samples"
    assert recorded_algorithm(then).after(_metrics()).reward_moments == (64, 9.0, 49.0)


def test_a_target_for_nothing() -> None:
    """It is refused: there is no coefficient to adapt."""
    with pytest.raises((ValidationError, Exception), match="set one of them above 0"):
        _algorithm(kl_target=1.0)
