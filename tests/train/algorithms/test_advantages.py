"""Group-relative advantages, held against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.algorithms.advantages import group_advantages, trajectory_advantages

Doubles = npt.NDArray[np.float64]
REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8)


def test_values_by_hand() -> None:
    """Rewards 0, 1, 2, 3: mean 1.5, unbiased variance 5/3; so (r - 1.5) / (sqrt(5/3) + epsilon)."""
    advantages = group_advantages(np.array([0.0, 1.0, 2.0, 3.0]), 0.5)
    scale = math.sqrt(5 / 3) + 0.5
    assert advantages == pytest.approx([-1.5 / scale, -0.5 / scale, 0.5 / scale, 1.5 / scale], rel=1e-14)


def test_the_standard_deviation_is_the_unbiased_one() -> None:
    """Of two rewards 0 and 1 it is sqrt(1/2), so the advantages are -+ sqrt(1/2), not -+ 1."""
    advantages = group_advantages(np.array([0.0, 1.0]), 1e-300)
    assert advantages == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-14)


@pytest.mark.parametrize("rewards", [[0.3], [0.25] * 5])
def test_nothing_to_compare_is_zero(rewards: list[float]) -> None:
    """A group of one, and a flat group, have advantage 0."""
    assert group_advantages(np.array(rewards), 1e-6).tolist() == [0.0] * len(rewards)


def test_groups_are_apart() -> None:
    """Interleaved groups are compared within themselves only."""
    advantages = trajectory_advantages(
        np.array([0.0, 10.0, 1.0, 30.0]), np.array([0, 1, 0, 1]), np.arange(4), 1e-12
    )
    half = math.sqrt(0.5)
    assert advantages == pytest.approx([-half, -half, half, half], rel=1e-9)


def test_fragments_of_a_trajectory_count_once() -> None:
    """A trajectory of three samples weighs as one in its group; all three get its advantage."""
    rewards = np.array([1.0, 1.0, 1.0, 0.0])
    advantages = trajectory_advantages(rewards, np.zeros(4, np.int64), np.array([0, 0, 0, 1]), 1e-12)
    half = math.sqrt(0.5)
    assert advantages == pytest.approx([half, half, half, -half], rel=1e-9)


@given(REWARDS, st.data())
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], data: st.DataObject) -> None:
    """Over a group's trajectories the mean is zero; scaling the rewards' offset changes nothing."""
    groups = [data.draw(st.sampled_from([0, 1])) for _ in rewards]
    advantages = trajectory_advantages(np.array(rewards), np.array(groups), np.arange(len(rewards)), 1e-6)
    for group in set(groups):
        of_group = [a for a, g in zip(advantages, groups, strict=True) if g == group]
        assert abs(sum(of_group)) < 1e-6 * max(1.0, max(map(abs, of_group)))


def _of_one_group(rewards: Doubles, epsilon: float) -> Doubles:
    """The arithmetic of the first release, group by group, whose bits are in recorded steps."""
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    advantages: Doubles = (rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)
    return advantages


def _group_by_group(rewards: Doubles, groups: list[int], names: list[int]) -> Doubles:
    """A loop over groups, each an array of its own: a trajectory counts by its last sample."""
    advantages = np.empty(len(rewards))
    for group in set(groups):
        mine = [i for i, name in enumerate(groups) if name == group]
        last = {names[i]: i for i in mine}
        of_group = _of_one_group(rewards[list(last.values())], 1e-6)
        by_name = dict(zip(last, of_group, strict=True))
        for i in mine:
            advantages[i] = by_name[names[i]]
    return advantages


@settings(max_examples=300)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1e-300, 1.0, 1e12, 1e200]),
    st.sampled_from(["as they come", "rounded", "zeros of both signs"]),
)
def test_the_bits_are_those_of_a_loop_over_groups(
    seed: int, sizes: list[int], split: float, scale: float, kind: str
) -> None:
    """Groups of all sizes, interleaved, some trajectories of several samples: each bit is the one that the
    group alone gives, so that recorded steps replay."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    names = np.arange(len(groups))
    again = rng.random(len(groups)) < split
    groups, names = np.append(groups, groups[again]), np.append(names, names[again])
    values = rng.standard_normal(len(names))
    if kind != "as they come":
        values = np.round(values, 1) if kind == "rounded" else 0.0 * values
    rewards = (values * scale)[names]
    with np.errstate(all="ignore"):
        expected = _group_by_group(rewards, groups.tolist(), names.tolist())
        advantages = trajectory_advantages(rewards, groups, names, 1e-6)
    assert advantages.tobytes() == expected.tobytes()


@pytest.mark.more
def test_many_groups_have_the_bits_of_each() -> None:
    """The same over tens of thousands of groups of one size, for the sizes that trainings have."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 4, 5, 7, 8, 9, 16, 64, 129):
        rewards = rng.standard_normal((100_000 // size, size))
        advantages = group_advantages(rewards.T, 1e-6).T
        assert advantages.tobytes() == np.stack([_of_one_group(row, 1e-6) for row in rewards]).tobytes()


@pytest.mark.parametrize("count", [1, 70_000, 200_000])
def test_many_groups_in_any_order(count: int) -> None:
    """More groups than 16 bits number, their members far apart, in runs or without an order: each has the
    advantages that it has beside the others in rows."""
    rng = np.random.default_rng(count)
    rows = rng.standard_normal((count, 3))
    expected = group_advantages(rows.T, 1e-6).T
    for members in (
        np.arange(3 * count),
        np.arange(3 * count).reshape(count, 3).T.ravel(),
        rng.permutation(3 * count),
    ):
        advantages = trajectory_advantages(rows.ravel()[members], members // 3, np.arange(len(members)), 1e-6)
        wanted = expected.ravel()[members]
        # As pytest.approx(wanted, rel=1e-9, abs=1e-12), which takes each of 600,000 numbers by itself.
        assert advantages.shape == wanted.shape
        assert (np.abs(advantages - wanted) <= np.maximum(1e-9 * np.abs(wanted), 1e-12)).all()


@given(REWARDS)
def test_order_of_rewards_is_kept(rewards: list[float]) -> None:
    """Who has the greater reward has no smaller advantage."""
    advantages = group_advantages(np.array(rewards), 1e-6)
    ranked = advantages[np.argsort(rewards, kind="stable")]
    assert (np.diff(ranked) >= 0).all()
