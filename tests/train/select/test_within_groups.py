"""Which samples of a group are used, against the same rule written plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.select import recipe
from rollbook.train.select.recipe import Members, best_and_worst, flat, in_several
from rollbook.train.select.sample_ref import numbered

_MEMBERS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 3), st.booleans()), max_size=30
)


def _members(rows: list[Any]) -> tuple[Members, np.ndarray[Any, Any]]:
    groups = numbered([group for group, _, _ in rows])
    rewards = np.array([float(reward) for _, reward, _ in rows])
    return Members(groups, np.arange(len(rows)), rewards), np.array([left for *_, left in rows], np.bool_)


@given(_MEMBERS)
def test_the_best_and_the_worst_of_each_group(rows: list[Any]) -> None:
    """Of those that are left; the first of equal ones; groups by their first member; none without a
    difference."""
    members, left = _members(rows)
    expected = []
    for group in dict.fromkeys(group for group, _, is_left in rows if is_left and group is not None):
        indices = [i for i, (name, _, is_left) in enumerate(rows) if is_left and name == group]
        best, worst = max(indices, key=lambda i: rows[i][1]), min(indices, key=lambda i: rows[i][1])
        if rows[best][1] > rows[worst][1]:
            expected.append([best, worst])
    assert best_and_worst(members, left).tolist() == expected


@given(_MEMBERS, st.sampled_from([1, 3, 1 << 15]), st.sampled_from([0.0, float("nan"), float("inf")]))
def test_groups_whose_rewards_are_all_equal(rows: list[Any], pieces: int, last: float) -> None:
    """Of those that are left, also where a group lies in several pieces; those in no group are one. NaN
    equals nothing."""
    rows = [(group, last if reward == 3 else reward, is_left) for group, reward, is_left in rows]
    members, left = _members(rows)
    rewards: dict[Any, list[float]] = {}
    for group, reward, is_left in rows:
        rewards.setdefault(group, []).extend([reward] if is_left else [])
    expected = [
        is_left and all(value == rewards[group][0] for value in rewards[group]) for group, _, is_left in rows
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_AT_ONCE", pieces)
        assert flat(members, left, left).tolist() == expected


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8))
def test_trajectories_with_several_samples(names: list[str]) -> None:
    """A sample is not alone where its trajectory's name comes twice."""
    assert in_several(numbered(names)).tolist() == [names.count(name) > 1 for name in names]
