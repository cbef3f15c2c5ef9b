"""Members of a group that were dropped, and count all the same: as if they had been trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.algorithms.rollouts import GroupPeers, Rollouts
from rollbook.train.select.drops import dropped_members, peers_of
from rollbook.train.select.recipe import Drop
from rollbook.train.select.samples import Sample, all_samples

MEMBER = st.tuples(
    st.integers(0, 3), st.floats(-9, 9, width=32), st.booleans(), st.integers(1, 9), st.booleans()
)
KEYS = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(["group_mean", "leave_one_out", "none"]),
        "deviation": st.sampled_from(["unbiased", "biased", "none"]),
        "truncated_reward": st.sampled_from([None, 0.5, -1.0]),
        "overlong_length": st.sampled_from([None, 6]),
        "reward_clip": st.sampled_from([None, [-2.0, 2.0]]),
    }
)


@given(st.lists(MEMBER, min_size=1, max_size=16), KEYS)
def test_advantages_are_those_of_the_whole_group(members: list[Any], keys: dict[str, Any]) -> None:
    """Of those that are kept, with the penalties of those that are not."""
    algorithm = PolicyGradient.model_validate(
        {"name": "policy_gradient", "overlong_buffer": 4, "group_size": 2, "std_epsilon": 0.1} | keys
    )
    whole = algorithm.advantages(_rollouts(members)).values
    kept = [i for i, member in enumerate(members) if member[2]]
    groups = [members[i][0] for i in kept]
    beside = [member for member in members if not member[2] and member[0] in groups]
    others = GroupPeers(
        np.array([groups.index(member[0]) for member in beside], np.int64),
        np.array([member[1] for member in beside], np.float64),
        np.array([member[3] for member in beside], np.int64),
        np.array([member[4] for member in beside], np.bool_),
    )
    advantages = algorithm.advantages(replace(_rollouts([members[i] for i in kept]), others=others)).values
    assert advantages == pytest.approx(whole[kept], rel=1e-9, abs=1e-9)


def _rollouts(members: list[Any]) -> Rollouts:
    return Rollouts(
        np.array([member[1] for member in members], np.float64),
        np.array([member[0] for member in members], np.int64),
        np.arange(len(members)),
        np.array([member[3] for member in members], np.int64),
        truncated=np.array([member[4] for member in members], np.bool_),
    )


def test_rewards_are_normalized_by_what_is_trained_on() -> None:
    """By the moments of the rewards 0 and 2 alone, which are 1 and 1: the third member counts as 3."""
    algorithm = PolicyGradient.model_validate(
        {"name": "policy_gradient", "group_size": 2, "reward_normalization": "batch", "deviation": "none"}
    )
    rollouts = _rollouts([(0, 0.0, True, 1, False), (0, 2.0, True, 1, False)])
    others = GroupPeers(np.array([1]), np.array([4.0]), np.array([1]), np.array([False]))
    advantages = algorithm.advantages(replace(rollouts, others=others)).values
    assert advantages == pytest.approx([-2.0, 0.0], abs=1e-6)


def _samples(*trajectories: Any) -> list[Sample]:
    return all_samples(fold(fabric.events([r for records in trajectories for r in records])).values())


def test_which_members_count() -> None:
    """Each once, with a reward that is a number, of a group that is trained on, if nothing of it is."""
    both = [fabric.T([1], [2, 3]), fabric.T([4], [5])]
    samples = _samples(
        fabric.records("kept", both, group="g", reward=1.0),
        fabric.records("twice", both, group="g", reward=0.5, status="truncated"),
        fabric.records("nan", group="g", reward=math.nan),
        fabric.records("none", group="g"),
        fabric.records("alone", reward=1.0),
        fabric.records("elsewhere", group="h", reward=1.0),
    )
    drops = [Drop(sample, "not_chosen", {}) for sample in samples[1:]]
    members = dropped_members(samples[:1], drops)
    named = {"trajectory_id": "twice", "run": "demo", "group": "g", "reward": 0.5}
    assert members == [named | {"tokens": 3, "truncated": True}]
    others = peers_of(samples[:1], members)
    assert others is not None
    assert (others.beside.tolist(), others.rewards.tolist()) == ([0], [0.5])
    assert (others.lengths.tolist(), others.truncated.tolist()) == ([3], [True])
    assert dropped_members([], drops) == []
    assert peers_of(samples, None) is None
