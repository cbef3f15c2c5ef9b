"""Parts that give another shape than is asked: an error that names them, before a step is planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import StepPlanned
from rollbook.train.algorithms import parts
from rollbook.train.algorithms.parts import check_advantages
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.algorithms.rollouts import Advantages, Rollouts
from rollbook.train.algorithms.trial import try_out
from rollbook.train.doctor.preflight import preflight

MODULE = '''
import numpy as np
import torch

from rollbook.train.algorithms.algorithm import Algorithm, Demand
from rollbook.train.algorithms.normalizers import Normalizer
from rollbook.train.algorithms.rollouts import Advantages


def of_groups(members):
    return np.zeros(len(members.sizes))


def number(members):
    return 0.0


def of_samples(log_ratios, lengths, bounds):
    return np.ones(len(lengths))


def summed(inputs, clips):
    return (-inputs.advantages * inputs.logprobs).sum(-1)


def of_rows(inputs, clips):
    return (-inputs.advantages * inputs.logprobs).sum(-1, keepdim=True)


def detached(inputs, clips):
    return -inputs.advantages * inputs.logprobs.detach()


def fails(inputs, clips):
    return inputs.no_such_field


def mean(difference):
    return difference.mean()


by_row = Normalizer(lambda losses, mask: losses.sum(-1), lambda of, length: of.tokens)
text = Normalizer(lambda losses, mask: losses.sum(), lambda of, length: "many")


class Mine(Algorithm):
    name: str
    """Says which algorithm it is."""

    @property
    def demand(self):
        return Demand(4)

    def advantages(self, of):
        return Advantages(of.rewards)

    def loss(self, inputs):
        return -inputs.advantages * inputs.logprobs


class Array(Mine):
    def advantages(self, of):
        return of.rewards


class Groups(Mine):
    def advantages(self, of):
        return Advantages(np.zeros(2))


class Tokens(Mine):
    def advantages(self, of):
        return Advantages(of.rewards, per_token=True)


class Returns(Mine):
    def advantages(self, of):
        return Advantages(of.rewards, returns=of.rewards)


class Mean(Mine):
    def loss(self, inputs):
        return -inputs.logprobs.mean()


class NoReturns(Mine):
    @property
    def needs(self):
        return frozenset({"values"})
'''
POLICY_GRADIENT = {"name": "policy_gradient", "groups": 2, "group_size": 4}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`odd`, a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})
    (tmp_path / "odd.py").write_text(MODULE)


CASES = [
    ({"baseline": "odd:of_groups"}, "baseline 'odd:of_groups' gave shape [2] where shape [4] was asked"),
    ({"baseline": "odd:number"}, "baseline 'odd:number' gave a float where shape [4] was asked"),
    (
        {"correction": "odd:of_samples", "old": "trainer"},
        "correction 'odd:of_samples' gave shape [6] where shape [15] was asked",
    ),
    ({"surrogate": "odd:summed"}, "surrogate 'odd:summed' gave shape [2] where shape [2, 3] was asked"),
    ({"surrogate": "odd:of_rows"}, "surrogate 'odd:of_rows' gave shape [2, 1] where shape [2, 3] was asked"),
    ({"surrogate": "odd:detached"}, "algorithm 'policy_gradient': its loss has no gradient"),
    ({"surrogate": "odd:fails"}, "surrogate 'odd:fails' failed: AttributeError"),
    (
        {"kl_estimator": "odd:mean", "kl": 0.1},
        "kl_estimator 'odd:mean' gave shape [] where shape [2, 3] was asked",
    ),
    ({"normalizer": "odd:by_row"}, "normalizer 'odd:by_row' gave shape [2] where shape [] was asked"),
    ({"normalizer": "odd:text"}, "algorithm 'policy_gradient': its divisor is a str, not a number"),
    ({"name": "odd:Array"}, "algorithm 'odd:Array' gave a ndarray where `Advantages` were asked"),
    ({"name": "odd:Groups"}, "algorithm 'odd:Groups': advantages gave shape [2] where shape [6] was asked"),
    ({"name": "odd:Tokens"}, "algorithm 'odd:Tokens': advantages gave shape [6] where shape [15] was asked"),
    ({"name": "odd:Returns"}, "algorithm 'odd:Returns': returns gave shape [6] where shape [15] was asked"),
    ({"name": "odd:Mean"}, "algorithm 'odd:Mean': loss gave shape [] where shape [2, 3] was asked"),
    ({"name": "odd:NoReturns"}, "'odd:NoReturns' needs values, and gave no returns for the critic to learn"),
]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("keys", "reason"), CASES)
def test_a_training_is_not_begun(recorded_path: Path, keys: dict[str, Any], reason: str) -> None:
    """Nothing is written; preflight says the same in red."""
    algorithm = keys if "name" in keys else POLICY_GRADIENT | keys
    settings = fabric.config(fabric.GRPO, steps=1, algorithm=algorithm)
    before = sorted(recorded_path.rglob("*"))
    with pytest.raises(TrainError, match=re.escape(reason)):
        _train(recorded_path, settings)
    assert sorted(recorded_path.rglob("*")) == before
    [check] = [result for result in preflight(settings, None, {}, "cut", 8 << 30) if result.name == "parts"]
    assert (check.verdict, reason in check.said) == ("red", True)


def _train(path: Path, settings: Any) -> None:
    from rollbook import store

    fabric.train(store.open(path), settings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_of_ours_pass(name: str) -> None:
    """With all keys that add a term or a stage."""
    keys: dict[str, Any] = {}
    if "surrogate" in ALGORITHMS[name].model_fields:
        keys = {"kl": 0.1, "reward_kl": 0.1, "entropy": 0.1, "dual_clip": 3.0, "turn_rewards": True}
        keys |= {"old": "trainer", "correction": "icepop", "overlong_length": 4, "truncated_reward": 0.5}
    try_out(ALGORITHMS[name].model_validate({"name": name} | keys))


def test_in_a_step_too(recorded: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is odd on a real batch only is held against it as well."""
    rollouts = Rollouts(np.zeros(2), np.zeros(2, np.int64), np.array([0, 1]), np.array([3, 2]))
    with pytest.raises(TrainError, match=re.escape("mine: advantages gave shape [1] where shape [2]")):
        check_advantages("mine", Advantages(np.zeros(1)), rollouts)
    log = recorded()
    monkeypatch.setattr("rollbook.train.loop.loop.try_out", lambda algorithm: None)
    monkeypatch.setattr(
        "rollbook.train.algorithms.policy_gradient.trajectory_advantages", lambda *given: np.zeros(1)
    )
    with pytest.raises(TrainError, match="algorithm 'grpo': advantages gave shape"):
        fabric.train(log, fabric.config(fabric.GRPO, steps=1))
    assert sum(isinstance(event.record, StepPlanned) for event in log.events()) == 1
