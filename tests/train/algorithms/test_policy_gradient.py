"""Named combinations: each trains from a log, says so in its manifests, and replays bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

NAMES = [name for name, kind in ALGORITHMS.items() if issubclass(kind, GroupPolicyGradient)]


@pytest.fixture(scope="module")
def trained_by(recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Gives the store of two steps by a table of keys, each trained once. Read it; never write."""
    folder, stores = tmp_path_factory.mktemp("trained"), dict[str, Store]()

    def trained(name: str, **keys: Any) -> Store:
        key = repr((name, keys))
        if key not in stores:
            log = rb.open(shutil.copytree(recorded_path, folder / str(len(stores))))
            algorithm = {"name": name, "groups": 2, "group_size": 4} | keys
            fabric.train(log, fabric.config(fabric.GRPO, steps=2, algorithm=algorithm))
            stores[key] = log
        return stores[key]

    return trained


def test_there_are_these() -> None:
    """In the order of the page."""
    assert [
        *("grpo", "policy_gradient", "rloo", "dr_grpo", "dapo", "gspo", "cispo"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "decoupled_ppo", "ppo"),
    ] == NAMES


@pytest.mark.more_but("ppo")
@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_replays(trained_by: Callable[..., Store], name: str) -> None:
    """Two steps of two groups of four; the manifest holds every key; the last step replays."""
    log = trained_by(name)
    steps, plans = records_of(log, StepCommitted), records_of(log, StepPlanned)
    expected = ALGORITHMS[name].model_validate({"name": name, "groups": 2, "group_size": 4})
    assert [plan.algorithm for plan in plans] == [expected.model_dump()] * 2
    assert all(step.metrics["gradient_norm"] > 0 for step in steps)
    assert replay_step(log, plans[-1].step).bit_for_bit


def test_all_defaults_are_grpo(trained_by: Callable[..., Store]) -> None:
    """One loss, up to the rounding of advantages; the gradient's norm too."""
    steps = records_of(trained_by("policy_gradient"), StepCommitted)
    expected = records_of(trained_by("grpo"), StepCommitted)
    for ours, grpo in zip(steps, expected, strict=True):
        for metric in ("loss", "gradient_norm"):
            assert ours.metrics[metric] == pytest.approx(grpo.metrics[metric], rel=1e-4, abs=1e-6)


def test_the_normalizer_scales_the_loss(trained_by: Callable[..., Store]) -> None:
    """A constant of 1 sums over tokens: the loss of the mean, times tokens a sample."""
    mean = records_of(trained_by("policy_gradient"), StepCommitted)[0].metrics
    by_one = trained_by("policy_gradient", normalizer="constant", constant_length=1)
    total = records_of(by_one, StepCommitted)[0].metrics
    scale = mean["trained_tokens"] / mean["samples"]
    assert total["gradient_norm"] == pytest.approx(scale * mean["gradient_norm"], rel=1e-4)


class Reversed(GroupPolicyGradient):
    """An estimator of one's own."""

    name: Literal["mine:Reversed"]
    """The algorithm that the other keys of the table belong to."""

    def of_tokens(self, rewards: Any, rollouts: Rollouts) -> Advantages:
        """The rewards of tokens, from the last to the first."""
        return Advantages(rewards[::-1], per_token=True)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [({}, False), ({"whitening": "mean"}, True), ({"discount": 0.5}, True), ({"turn_rewards": True}, True)],
)
def test_an_estimator_of_ones_own_is_asked_where_a_key_speaks_of_tokens(keys: Any, asked: bool) -> None:
    """Whitening is of tokens too, though all tokens of a sample have one advantage before it."""
    plain = {"name": "mine:Reversed", "baseline": "none", "deviation": "none"}
    rollouts = Rollouts(np.array([4.0, 8.0]), np.arange(2), np.arange(2), np.array([2, 1]))
    advantages = Reversed.model_validate(plain | keys).advantages(rollouts)
    assert (advantages.per_token, advantages.values.tolist()) == (
        asked,
        [8.0, 4.0, 0.0] if asked else [4.0, 8.0],
    )
