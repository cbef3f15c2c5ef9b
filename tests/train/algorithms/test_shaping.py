"""Shaping of rewards: penalties by hand, and what they make of advantages."""

from __future__ import annotations

import numpy as np
import pytest

from rollbook.train.algorithms.advantages import overlong_penalty, stopped_properly
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.algorithms.rollouts import Rollouts


def test_the_overlong_penalty_by_hand() -> None:
    """A buffer of 4 before 10: nothing up to 6, all from 10 on."""
    penalties = overlong_penalty(np.array([1, 6, 7, 9, 10, 50]), 10, 4)
    assert penalties.tolist() == [0, 0, -0.25, -0.75, -1, -1]


@pytest.mark.parametrize(
    ("coefficient", "expected"), [(0.5, [2, 1, -2]), (0.0, [2, 0, 0]), (-1.5, [2, -1.5, -1.5])]
)
def test_stopping_properly_by_hand(coefficient: float, expected: list[float]) -> None:
    """Multiplied by a coefficient, or replaced by a negative one, where a trajectory was cut off."""
    shaped = stopped_properly(np.array([2.0, 2.0, -4.0]), np.array([False, True, True]), coefficient)
    assert shaped.tolist() == expected


def test_a_trajectory_is_as_long_as_all_of_its_samples() -> None:
    """Two samples of 5 tokens are one trajectory of 10, cut off if one of them was; clipping comes last."""
    rollouts = Rollouts(
        rewards=np.array([1.0, 1.0, 1.0]),
        groups=np.zeros(3, np.int64),
        trajectories=np.array([0, 0, 1]),
        lengths=np.array([5, 5, 2]),
        truncated=np.array([False, True, False]),
    )
    keys = {"baseline": "none", "deviation": "none", "overlong_length": 10, "overlong_buffer": 4}

    def advantages(**more: object) -> list[float]:
        algorithm = PolicyGradient.model_validate({"name": "policy_gradient"} | keys | more)
        values: list[float] = algorithm.advantages(rollouts).values.tolist()
        return values

    assert advantages() == [0, 0, 1]
    assert advantages(overlong_factor=3.0) == [-2, -2, 1]
    assert advantages(overlong_factor=3.0, reward_clip=(-1.0, 0.5)) == [-1, -1, 0.5]
    assert advantages(truncated_reward=0.5) == [-0.5, -0.5, 1]
    assert advantages(truncated_reward=-2.0, overlong_length=None) == [-2, -2, 1]
