"""Group-relative advantages, held against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.algorithms.advantages import group_advantages, trajectory_advantages

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8)


def test_values_by_hand() -> None:
    """Rewards 0, 1, 2, 3: mean 1.5, unbiased variance 5/3; so (r - 1.5) / (sqrt(5/3) + epsilon)."""
    found = group_advantages(np.array([0.0, 1.0, 2.0, 3.0]), 0.5)
    scale = math.sqrt(5 / 3) + 0.5
    assert found == pytest.approx([-1.5 / scale, -0.5 / scale, 0.5 / scale, 1.5 / scale], rel=1e-14)


def test_the_standard_deviation_is_the_unbiased_one() -> None:
    """Of two rewards 0 and 1 it is sqrt(1/2), so the advantages are -+ sqrt(1/2), not -+ 1."""
    found = group_advantages(np.array([0.0, 1.0]), 1e-300)
    assert found == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-14)


@pytest.mark.parametrize("rewards", [[0.3], [0.25] * 5])
def test_nothing_to_compare_is_zero(rewards: list[float]) -> None:
    """A group of one, and a flat group, have advantage 0."""
    assert group_advantages(np.array(rewards), 1e-6).tolist() == [0.0] * len(rewards)


def test_groups_are_apart() -> None:
    """Interleaved groups are compared within themselves only."""
    found = trajectory_advantages(
        np.array([0.0, 10.0, 1.0, 30.0]), ["a", "b", "a", "b"], ["a0", "b0", "a1", "b1"], 1e-12
    )
    half = math.sqrt(0.5)
    assert found == pytest.approx([-half, -half, half, half], rel=1e-9)


def test_fragments_of_a_trajectory_count_once() -> None:
    """A trajectory of three samples weighs as one in its group; all three get its advantage."""
    rewards = np.array([1.0, 1.0, 1.0, 0.0])
    found = trajectory_advantages(rewards, ["g"] * 4, ["t", "t", "t", "u"], 1e-12)
    half = math.sqrt(0.5)
    assert found == pytest.approx([half, half, half, -half], rel=1e-9)


@given(REWARDS, st.data())
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], data: st.DataObject) -> None:
    """Over a group's trajectories the mean is zero; scaling the rewards' offset changes nothing."""
    groups = [data.draw(st.sampled_from("ab")) for _ in rewards]
    names = [str(i) for i in range(len(rewards))]
    found = trajectory_advantages(np.array(rewards), groups, names, 1e-6)
    for group in set(groups):
        of_group = [a for a, g in zip(found, groups, strict=True) if g == group]
        assert abs(sum(of_group)) < 1e-6 * max(1.0, max(map(abs, of_group)))


@given(REWARDS)
def test_order_of_rewards_is_kept(rewards: list[float]) -> None:
    """Who has the greater reward has no smaller advantage."""
    found = group_advantages(np.array(rewards), 1e-6)
    ranked = found[np.argsort(rewards, kind="stable")]
    assert (np.diff(ranked) >= 0).all()
