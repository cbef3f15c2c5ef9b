"""Baselines, held against a loop over groups in plain Python."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.algorithms.advantages import grouped, trajectory_advantages
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.algorithms.rollouts import Rollouts

REWARD = st.floats(-100, 100, width=32)
SAMPLES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=40)


def _algorithm(baseline: str, deviation: str, epsilon: float = 1e-6) -> PolicyGradient:
    keys = {"baseline": baseline, "deviation": deviation, "std_epsilon": epsilon}
    return PolicyGradient.model_validate({"name": "policy_gradient"} | keys)


def _advantages(algorithm: GroupPolicyGradient, *groups: list[float]) -> list[list[float]]:
    """Advantages of groups of trajectories of one sample each."""
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rewards = np.array([r for group in groups for r in group])
    rollouts = Rollouts(rewards, numbers, np.arange(len(numbers)), np.ones(len(numbers), np.int64))
    values = algorithm.advantages(rollouts).values.tolist()
    return [[values.pop(0) for _ in group] for group in groups]


def test_leave_one_out_by_hand() -> None:
    """Rewards 1, 2, 6: the others' means are 4, 3.5 and 1.5."""
    assert _advantages(_algorithm("leave_one_out", "none"), [1.0, 2.0, 6.0]) == [[-3.0, -1.5, 4.5]]


def test_dr_grpo_by_hand() -> None:
    """Rewards less their group's mean, not divided by anything."""
    advantages = _advantages(_algorithm("group_mean", "none"), [0.0, 1.0, 5.0], [7.0, 9.0])
    assert advantages == [[-2.0, -1.0, 3.0], [-1.0, 1.0]]


@pytest.mark.parametrize(("deviation", "expected"), [("unbiased", 0.5**0.5), ("biased", 1.0)])
def test_deviations_by_hand(deviation: str, expected: float) -> None:
    """Of rewards 0 and 1 the deviation is sqrt(1/2) over n - 1 and 1/2 over n."""
    [advantages] = _advantages(_algorithm("group_mean", deviation, 1e-300), [0.0, 1.0])
    assert advantages == pytest.approx([-expected, expected], rel=1e-14)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("deviation", ["unbiased", "biased", "none"])
def test_nothing_to_compare_is_zero(baseline: str, deviation: str) -> None:
    """A group of one, and a group of equal rewards, have advantage 0, and no NaN."""
    assert _advantages(_algorithm(baseline, deviation), [3.0], [0.25] * 4) == [[0.0], [0.0] * 4]


def _expected(baseline: str, deviation: str, rewards: list[float], at: int) -> float:
    others = [r for i, r in enumerate(rewards) if i != at]
    mean = {"group_mean": statistics.fmean(rewards), "none": 0.0}.get(baseline)
    if mean is None:
        mean = statistics.fmean(others) if others else rewards[at]
    spread = {"unbiased": statistics.stdev, "biased": statistics.pstdev}.get(deviation)
    if spread is None:
        return rewards[at] - mean
    few = len(rewards) <= (deviation == "unbiased")
    return (rewards[at] - mean) / ((1.0 if few else spread(rewards)) + 1e-6)


@given(
    SAMPLES,
    st.lists(REWARD, min_size=35, max_size=35),
    st.sampled_from(["group_mean", "leave_one_out", "none"]),
)
@pytest.mark.parametrize("deviation", ["unbiased", "biased", "none"])
def test_a_loop_over_groups_says_the_same(
    deviation: str, samples: list[tuple[int, int]], rewards: list[float], baseline: str
) -> None:
    """Interleaved groups, and trajectories of several samples, which count once."""
    reward = {(g, t): rewards[7 * g + t] for g, t in samples}
    rollouts = Rollouts(
        np.array([reward[sample] for sample in samples]),
        np.array([g for g, _ in samples]),
        np.array([7 * g + t for g, t in samples]),
        np.ones(len(samples), np.int64),
    )
    advantages = _algorithm(baseline, deviation).advantages(rollouts).values
    for (group, trajectory), advantage in zip(samples, advantages, strict=True):
        members = sorted({sample for sample in samples if sample[0] == group})
        expected = _expected(
            baseline, deviation, [reward[sample] for sample in members], members.index((group, trajectory))
        )
        assert advantage == pytest.approx(expected, rel=1e-5, abs=1e-4)


@given(st.lists(REWARD, min_size=2, max_size=8), st.floats(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    """A constant added to the rewards of a group is no reason to act otherwise."""
    for baseline in ("group_mean", "leave_one_out"):
        algorithm = _algorithm(baseline, "none")
        [advantages], [shifted] = (
            _advantages(algorithm, rewards),
            _advantages(algorithm, [r + shift for r in rewards]),
        )
        assert shifted == pytest.approx(advantages, abs=1e-9)


@given(st.lists(REWARD, min_size=2, max_size=8))
def test_all_defaults_are_grpos_advantages(rewards: list[float]) -> None:
    """Up to rounding: `grpo` keeps its own arithmetic."""
    [advantages] = _advantages(_algorithm("group_mean", "unbiased"), rewards)
    group, each = np.zeros(len(rewards), np.int64), np.arange(len(rewards))
    expected = trajectory_advantages(np.array(rewards), group, each, 1e-6)
    assert advantages == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


@given(SAMPLES, st.booleans(), st.booleans(), st.booleans())
def test_trajectories_are_in_the_order_of_their_first_samples(
    samples: list[tuple[int, int]], distinct: bool, shared: bool, in_order: bool
) -> None:
    """Sums are added in that order, whether or not each trajectory has one sample; a number counts within its
    group. Numbers may have gaps, and groups keep their order."""
    if distinct:
        samples = list(dict.fromkeys(samples))
    names = [t if shared else 7 * g + t for g, t in samples]
    if in_order:
        names = [list(dict.fromkeys(names)).index(name) for name in names]
    rewards = np.array([1 / (7 * g + t + 1) for g, t in samples])
    grouping = grouped(rewards, np.array([g for g, _ in samples]), np.array(names))
    trajectories = list(dict.fromkeys(samples))
    groups = sorted({g for g, _ in samples})
    assert grouping.of_sample.tolist() == [trajectories.index(sample) for sample in samples]
    assert grouping.groups.tolist() == [groups.index(g) for g, _ in trajectories]
    assert grouping.rewards.tolist() == [1 / (7 * g + t + 1) for g, t in trajectories]
    sums, sizes = [0.0] * len(groups), [0] * len(groups)
    for at, reward in zip(grouping.groups.tolist(), grouping.rewards.tolist(), strict=True):
        sums[at] += reward
        sizes[at] += 1
    assert (grouping.sums.tolist(), grouping.sizes.tolist()) == (sums, sizes)
    values = rewards[: len(trajectories)]
    assert grouping.for_samples(values).tolist() == [values[trajectories.index(sample)] for sample in samples]
    expected = [sizes[group] for group in grouping.groups.tolist()]
    assert np.broadcast_to(grouping.for_members(grouping.sizes), len(trajectories)).tolist() == expected


def test_of_no_sample_there_is_no_trajectory() -> None:
    """Nothing comes of nothing."""
    none = np.zeros(0, np.int64)
    grouping = grouped(np.zeros(0), none, none)
    assert (len(grouping.rewards), len(grouping.groups), len(grouping.sizes), len(grouping.sums)) == (
        0,
        0,
        0,
        0,
    )
    assert trajectory_advantages(np.zeros(0), none, none, 1e-6).tolist() == []
