"""GDPO's advantages: rewards of several sources, each normalized by itself, against numbers by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollbook.store.errors import ConfigError
from rollbook.train.algorithms.gdpo import Gdpo
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.rollouts import Rollouts
from rollbook.train.algorithms.trial import try_out
from rollbook.train.config.config import parse_config

NONE = np.nan


def _gdpo(**keys: Any) -> Gdpo:
    return Gdpo.model_validate({"name": "gdpo"} | keys)


def _rollouts(parts: Any, weights: Any, groups: Any, trajectories: Any = None) -> Rollouts:
    parts, weights = np.asarray(parts, np.float64), np.asarray(weights, np.float64)
    count = len(parts)
    return Rollouts(
        rewards=np.nansum(parts * weights, axis=1),
        groups=np.asarray(groups, np.int64),
        trajectories=np.arange(count) if trajectories is None else np.asarray(trajectories, np.int64),
        lengths=np.ones(count, np.int64),
        reward_parts=parts,
        reward_weights=weights,
    )


def _advantages(rollouts: Rollouts, **keys: Any) -> list[float]:
    return _gdpo(**keys).advantages(rollouts).values.tolist()


def _near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


def test_each_source_is_normalized_in_its_group_and_the_sum_over_the_batch() -> None:
    """By hand: deviations over n - 1, which are 1 and sqrt(2) times the distances from the mean here."""
    half = 1 / np.sqrt(2)
    rollouts = _rollouts([(1, 0), (0, 8), (5, 3), (5, 1)], (1.0, 0.5), [0, 0, 1, 1])
    sums = [half - half / 2, -half + half / 2, half / 2, -half / 2]
    assert _advantages(rollouts, batch_normalization="none") == _near(sums)
    deviation = np.sqrt(sum(value**2 for value in sums) / 3)
    assert _advantages(rollouts) == _near([value / deviation for value in sums])
    even = _rollouts([(1, 0), (0, 1)], (1.0, 1.0), [0, 0])
    assert _advantages(even) == [0.0, 0.0], "what one source takes, the other gives"


def test_sources_of_equal_sums_are_told_apart() -> None:
    """Which a group's advantages of the sums alone cannot do: the paper's case for it."""
    rollouts = _rollouts([(1, 0), (1, 0), (0, 1)], (1.0, 1.0), [0, 0, 0])
    assert Grpo.model_validate({"name": "grpo"}).advantages(rollouts).values.tolist() == [0, 0, 0]
    weighed = _rollouts([(1, 0), (1, 0), (0, 1)], (2.0, 1.0), [0, 0, 0])
    one = 1 / np.sqrt(3)
    assert _advantages(weighed, batch_normalization="none") == _near([one, one, -2 * one])


def test_a_source_that_says_nothing() -> None:
    """Leaves a member out of its mean and deviation, and adds nothing to that member's sum."""
    half = 1 / np.sqrt(2)
    rollouts = _rollouts([(1, NONE), (3, 0), (2, 4)], (1.0, 1.0), [0, 0, 0])
    assert _advantages(rollouts, batch_normalization="none") == _near([-1.0, 1.0 - half, half])
    alone = _rollouts([(1, NONE), (3, 9), (2, NONE)], (1.0, 1.0), [0, 0, 0])
    assert _advantages(alone, batch_normalization="none") == _near([-1, 1, 0]), "one alone compares with none"
    silent = _rollouts([(1, NONE), (3, NONE)], (1.0, 1.0), [0, 0])
    assert _advantages(silent, batch_normalization="none") == _near([-half, half])


def test_a_trajectory_of_several_samples_counts_once() -> None:
    """In its group, and in the batch; each of its samples has its advantage."""
    parts, groups = [(1, 0), (0, 2), (4, 1), (2, 1)], [0, 0, 1, 1]
    expected = _advantages(_rollouts(parts, (1.0, 0.5), groups))
    split = [0, 0, 1, 2, 3, 3]
    rollouts = _rollouts([parts[i] for i in split], (1.0, 0.5), [groups[i] for i in split], split)
    assert _advantages(rollouts) == _near([expected[i] for i in split])


@given(st.integers(0, 500))
def test_scales_of_sources_do_not_matter(seed: int) -> None:
    """A source in other units, or shifted, gives the same advantages, and so does another order of them."""
    generator = np.random.default_rng(seed)
    parts = generator.normal(size=(12, 3))
    parts[generator.random(parts.shape) < 0.2] = NONE
    groups = np.repeat(np.arange(3), 4)
    expected = _advantages(_rollouts(parts, (1.0, 0.5, -2.0), groups), std_epsilon=1e-12)
    moved = _rollouts(parts * (7.0, 0.1, 3.0) + (5.0, -1.0, 0.0), (1.0, 0.5, -2.0), groups)
    assert _advantages(moved, std_epsilon=1e-12) == pytest.approx(expected, abs=1e-6)
    turned = _rollouts(parts[:, ::-1], (-2.0, 0.5, 1.0), groups)
    assert _advantages(turned, std_epsilon=1e-12) == pytest.approx(expected, abs=1e-9)


def test_one_trajectory_alone() -> None:
    """Has nothing to be compared with."""
    assert _advantages(_rollouts([(1, 0)], (1.0, 1.0), [0])) == [0.0]


def test_what_it_needs() -> None:
    """What a policy gradient over groups needs, and the sources; it is tried as any other is."""
    assert _gdpo().needs == {"logprobs", "rewards", "groups", "reward_sources"}
    try_out(_gdpo())
    try_out(_gdpo(discount=0.9, whitening="unbiased", baseline="leave_one_out", deviation="biased"))


@pytest.mark.parametrize(
    "keys",
    [
        {"turn_rewards": True},
        {"reward_clip": [-1, 1]},
        {"truncated_reward": 0.5},
        {"overlong_length": 100},
        {"reward_normalization": "batch"},
        {"reward_kl": 0.1, "reward_kl_order": "before_baseline"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_of_the_whole_reward(keys: dict[str, Any]) -> None:
    """There is none before sources are normalized: record a source of its own."""
    with pytest.raises(ValidationError, match=r"takes those of its sources apart: .* as a source of its own"):
        Gdpo.model_validate_json(json.dumps({"name": "gdpo"} | keys))


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({}, r"name the sources by recipe\.reward_weights, as in \{ correct = 1\.0"),
        ({"reward_weights": {}}, "at least 1 item"),
        ({"reward_weights": {"a": "much"}}, "reward_weights.a"),
        ({"reward_weights": {"a": 1.0}, "reward_source": "judge"}, "leave one of the two out"),
        (
            {"reward_weights": {"a": 1.0}, "group_statistics": "all"},
            "compares those of each source: leave it out",
        ),
    ],
)
def test_recipes_that_it_cannot_go_by(recipe: dict[str, Any], text: str) -> None:
    """Each error says what to do."""
    values = {"model": "m", "steps": 1, "algorithm": {"name": "gdpo"}, "recipe": recipe}
    with pytest.raises(ConfigError, match=text):
        parse_config(values, "test")
