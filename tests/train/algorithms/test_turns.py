"""Rewards of turns, and a discount for each of them: two and three turns, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import RewardAssigned, StepCommitted, StepPlanned
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.returns import (
    discounted_returns,
    generalized_advantages,
    of_trajectories,
    turn_advantages,
    turn_returns,
)
from rollbook.train.algorithms.rollouts import Rollouts

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)
SHARE = st.floats(0, 1)
PLAIN = {"name": "policy_gradient", "baseline": "none", "deviation": "none", "turn_rewards": True}

# Of two samples: turns of 2 and 1 tokens, with rewards 1 and 2; and of 1, 2 and 1 tokens with 0, 4 and 8.
# The trajectories' own rewards are 16 and 32.
TWO_AND_THREE = Rollouts(
    rewards=np.array([16.0, 32.0]),
    groups=np.array([0, 1]),
    trajectories=np.array([0, 1]),
    lengths=np.array([3, 4]),
    turn_rewards=np.array([0.0, 1.0, 2.0, 0.0, 0.0, 4.0, 8.0]),
    number_turns=lambda: np.array([0, 0, 1, 0, 1, 1, 2]),
)


def _advantages(rollouts: Rollouts = TWO_AND_THREE, **keys: Any) -> list[float]:
    advantages = recorded_algorithm(PLAIN | keys).advantages(rollouts)
    assert advantages.per_token
    return advantages.values.tolist()


def test_without_a_discount() -> None:
    """Each token has the rewards of its turn and of those after it, and the trajectory's."""
    expected = [19, 19, 18, 44, 44, 44, 40]
    assert _advantages() == expected
    assert _advantages(discount_unit="turn") == expected


def test_with_a_discount_of_turns() -> None:
    """A half for each turn that is in between: tokens of a turn are equal."""
    assert _advantages(discount=0.5, discount_unit="turn") == [10, 10, 18, 12, 24, 24, 40]


def test_with_a_discount_of_tokens() -> None:
    """A half for each token that is in between, which is what is told otherwise."""
    assert _advantages(discount=0.5) == [5, 10, 18, 6, 12, 24, 40]


def test_turn_rewards_alone() -> None:
    """Of a trajectory whose own reward is 0, and without them nothing is left."""
    rollouts = Rollouts(
        np.zeros(2),
        np.array([0, 1]),
        np.array([0, 1]),
        TWO_AND_THREE.lengths,
        turn_rewards=TWO_AND_THREE.turn_rewards,
        number_turns=TWO_AND_THREE.number_turns,
    )
    assert _advantages(rollouts, discount=0.5, discount_unit="turn") == [2, 2, 2, 4, 8, 8, 8]
    assert _advantages(rollouts, discount=0.5, turn_rewards=False) == [0] * 7


def test_the_baseline_is_of_the_trajectory() -> None:
    """Of one group with rewards 16 and 32 the mean goes; the turns' rewards stay as they are."""
    rollouts = Rollouts(
        TWO_AND_THREE.rewards,
        np.array([0, 0]),
        np.array([0, 1]),
        TWO_AND_THREE.lengths,
        turn_rewards=TWO_AND_THREE.turn_rewards,
        number_turns=TWO_AND_THREE.number_turns,
    )
    advantages = _advantages(rollouts, baseline="group_mean", discount=0.5, discount_unit="turn")
    assert advantages == [-2, -2, -6, 6, 12, 12, 16]


def test_gae_of_turns_by_hand() -> None:
    """Turns of 2 and 1 tokens; rewards 0, 1, 2, values 4, 2, 6, discount 1/2, decay 1/2."""
    one, turns = np.array([0]), np.array([3, 3, 5])
    rollouts = Rollouts(np.zeros(1), one, one, np.array([3]), number_turns=lambda: turns)
    advantages = turn_advantages(np.array([0.0, 1.0, 2.0]), np.array([4.0, 2.0, 6.0]), rollouts, 0.5, 0.5)
    last = 2 - 6
    middle = (1 + 0.5 * 6 - 2) + 0.5 * 0.5 * last
    assert advantages.tolist() == [(0 + 2 - 4) + 0.5 * middle, middle, last]


def test_ppo_takes_it_too() -> None:
    """Its critic learns the return that is discounted by turns."""
    rollouts = Rollouts(
        TWO_AND_THREE.rewards,
        np.array([0, 1]),
        np.array([0, 1]),
        TWO_AND_THREE.lengths,
        turn_rewards=TWO_AND_THREE.turn_rewards,
        number_turns=TWO_AND_THREE.number_turns,
        values=np.zeros(7, np.float32),
    )
    keys = {"name": "ppo", "turn_rewards": True, "discount": 0.5, "discount_unit": "turn"}
    advantages = recorded_algorithm(keys).advantages(rollouts)
    assert advantages.returns is not None
    assert advantages.returns.tolist() == [10, 10, 18, 12, 24, 24, 40]


def _random(lengths: list[int], seed: int, turns: Any) -> tuple[Rollouts, Any, Any]:
    random, count = np.random.default_rng(seed), sum(lengths)
    names = np.arange(len(lengths))
    rollouts = Rollouts(
        np.zeros(len(lengths)), names, names, np.array(lengths), number_turns=lambda: turns(count)
    )
    return rollouts, random.normal(size=count), random.normal(size=count)


@given(LENGTHS, st.integers(0, 2**31), SHARE, SHARE)
def test_turns_of_one_token_are_tokens(lengths: list[int], seed: int, discount: float, decay: float) -> None:
    """And a sample of one turn has no discount at all."""
    rollouts, rewards, values = _random(lengths, seed, np.arange)
    assert turn_returns(rewards, rollouts, discount) == pytest.approx(
        discounted_returns(rewards, rollouts.lengths, discount)
    )
    assert turn_advantages(rewards, values, rollouts, discount, decay) == pytest.approx(
        generalized_advantages(rewards, values, rollouts.lengths, discount, decay)
    )
    whole, rewards, _ = _random(lengths, seed, lambda count: np.zeros(count, np.int64))
    assert turn_returns(rewards, whole, discount) == pytest.approx(
        discounted_returns(rewards, whole.lengths, 1.0)
    )


def test_sums_of_trajectories() -> None:
    """Over all samples of each; a name counts within its group, and a sample may have no token."""
    rollouts = Rollouts(np.zeros(4), np.array([0, 0, 1, 0]), np.array([0, 1, 0, 0]), np.array([2, 0, 1, 1]))
    assert of_trajectories(np.array([1.0, 2.0, 4.0, 8.0]), rollouts).tolist() == [11, 0, 4, 11]


def test_a_training_with_turn_rewards(recorded: Callable[..., Store]) -> None:
    """Turns of the recorded rollouts have rewards; with them the advantages are others, by the unit of the
    discount too; each of these steps replays."""
    digests = {}
    for name, keys in {
        "none": {"turn_rewards": False},
        "tokens": {"discount_unit": "token"},
        "turns": {"discount_unit": "turn"},
    }.items():
        log = recorded(name)
        rewards = [RewardAssigned(f"g{g}.{i}", f"g{g}.{i}.0", 1.0 + i) for g in range(6) for i in range(4)]
        fabric.append(log, rewards, lane="judge")
        algorithm = {"name": "rloo", "groups": 2, "group_size": 4, "turn_rewards": True, "discount": 0.5}
        fabric.train(log, fabric.config(fabric.GRPO, steps=2, algorithm=algorithm | keys))
        steps = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
        plans = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
        digests[name] = steps[0].digests["advantages"]
        assert len(steps) == 2
        assert plans[0].algorithm["discount_unit"] == keys.get("discount_unit", "token")
        assert [replay_step(log, plan.step).bit_for_bit for plan in plans] == [True, True]
    assert len(set(digests.values())) == 3
