"""Parts of one's own, by `module:name`: they train, their source is recorded, and a replay asks before it
runs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.algorithms import parts
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.batches.manifest_batch import samples_at_cut

Stores = Callable[..., Store]
SURROGATE = '''
def halved(inputs, clips):
    """Half of minus advantage times logprob."""
    return -inputs.advantages * inputs.logprobs / 2
'''
ALGORITHM = '''
from rollbook.train.algorithms.algorithm import Algorithm, Demand
from rollbook.train.algorithms.rollouts import Advantages


class Mine(Algorithm):
    """The reward itself as the advantage of four samples."""

    name: str
    """Says which algorithm it is."""
    scale: float = 1.0
    """Of the loss."""

    @property
    def needs(self):
        return frozenset({"rewards"})

    @property
    def demand(self):
        return Demand(4)

    def advantages(self, of):
        return Advantages(of.rewards)

    def loss(self, inputs):
        return -self.scale * inputs.advantages * inputs.logprobs
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes modules that can be imported; what was loaded is forgotten before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    return write


def _config(**algorithm: Any) -> Any:
    return fabric.config(fabric.GRPO, steps=2, algorithm={"groups": 2, "group_size": 4} | algorithm)


def test_a_surrogate_of_ones_own(
    recorded: Stores, module: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of REINFORCE's gradient; a replay is refused, until it is told to trust; another source is
    told."""
    file = module("own_surrogate", SURROGATE)
    ours, plain = recorded("ours"), recorded("plain")
    fabric.train(ours, _config(name="policy_gradient", surrogate="own_surrogate:halved"))
    fabric.train(plain, _config(name="policy_gradient", surrogate="reinforce"))
    norms = [records_of(log, StepCommitted)[0].metrics["gradient_norm"] for log in (ours, plain)]
    assert norms[0] == pytest.approx(norms[1] / 2, rel=1e-5)
    digests = [plan.environment["parts"] for plan in records_of(ours, StepPlanned)]
    assert [list(names) for names in digests] == [["own_surrogate:halved"]] * 2
    assert "parts" not in records_of(plain, StepPlanned)[0].environment
    monkeypatch.setattr(parts, "_loaded", {})
    with pytest.raises(TrainError, match=r"code of its own, 'own_surrogate:halved'.*--trust-parts"):
        replay_step(ours, 1)
    result = replay_step(ours, 1, trust_parts=True)
    assert (result.bit_for_bit, result.environment) == (True, [])
    file.write_text(SURROGATE + "# another source\n")
    result = replay_step(ours, 1, trust_parts=True)
    assert result.environment[0].startswith("parts.own_surrogate:halved: recorded '")


def test_an_algorithm_of_ones_own(
    recorded: Stores, module: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file: it trains, resumes and replays; its keys are checked."""
    module("own_algorithm", ALGORITHM)
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=2, algorithm={"name": "own_algorithm:Mine", "scale": 0.5})
    fabric.train(log, settings)
    plans = records_of(log, StepPlanned)
    assert [plan.algorithm for plan in plans] == [{"name": "own_algorithm:Mine", "scale": 0.5}] * 2
    assert [len(plan.samples) for plan in plans] == [4, 4]
    fabric.train(log, settings.model_copy(update={"steps": 3}))
    monkeypatch.setattr(parts, "_loaded", {})
    assert replay_step(log, 2, trust_parts=True).bit_for_bit
    with pytest.raises(ConfigError, match="scal: "):
        fabric.config(fabric.GRPO, algorithm={"name": "own_algorithm:Mine", "scal": 1})


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"name": "policy_gradient", "surrogate": "no_such_module:f"}, "'no_such_module:f' cannot be loaded"),
        ({"name": "policy_gradient", "surrogate": "own_surrogate:g"}, "'own_surrogate:g' cannot be loaded"),
        ({"name": "own_surrogate:halved"}, "'own_surrogate:halved' is no subclass of"),
        ({"name": "policy_gradient", "surrogate": "ppo clip"}, "algorithm.surrogate"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    module: Callable[[str, str], Path], algorithm: Any, reason: str
) -> None:
    """When the CONFIG is read, before anything is written."""
    module("own_surrogate", SURROGATE)
    with pytest.raises(ConfigError, match=reason):
        _config(**algorithm) if algorithm["name"] == "policy_gradient" else fabric.config(
            fabric.GRPO, algorithm=algorithm
        )


NEEDY = '''
import torch

SEEN = []


def bonus(inputs, clips):
    """REINFORCE with a bonus for entropy, of tokens that the engine gave some probability."""
    SEEN.append(inputs)
    return -inputs.advantages * inputs.logprobs - 0.1 * inputs.entropy


bonus.needs = {"entropy", "reference"}


def old(inputs, clips):
    return -inputs.logprobs


old.needs = {"old"}


def pairs(members):
    return members.rewards


pairs.needs = ["pairs"]


def groups(members):
    return members.rewards


groups.needs = {"groups"}


def values(inputs, clips):
    return -inputs.logprobs


values.needs = {"values"}


def typo(inputs, clips):
    return -inputs.logprobs


typo.needs = {"entropie"}


def text(inputs, clips):
    return -inputs.logprobs


text.needs = "entropy"
'''
POLICY_GRADIENT = {"name": "policy_gradient", "groups": 2, "group_size": 4}


def test_a_part_is_given_what_it_needs(recorded: Stores, module: Callable[[str, str], Path]) -> None:
    """The entropy with its gradient, the reference's logprobs, the engine's as recorded, and the counts of
    the whole batch, whatever micro-batch it sees; the step replays."""
    module("needy", NEEDY)
    log = recorded()
    keys = POLICY_GRADIENT | {"surrogate": "needy:bonus", "old": "trainer"}
    settings = fabric.config(fabric.GRPO, steps=1, algorithm=keys)
    assert settings.algorithm.needs >= {"entropy", "reference", "old", "logprobs"}
    fabric.train(log, settings)
    [plan], [step] = records_of(log, StepPlanned), records_of(log, StepCommitted)
    assert "reference_weights" in plan.input_digests
    assert {"reference_logprobs", "proximal_logprobs"} <= set(step.digests)
    seen = parts.loaded_part("needy:bonus").__globals__["SEEN"][-len(plan.partition[0]) :]
    assert len(seen) > 1
    for inputs in seen:
        assert inputs.entropy.requires_grad
        assert inputs.totals == Totals(step.metrics["trained_tokens"], step.metrics["samples"])
        trained = inputs.mask
        assert not torch.equal(inputs.behaviour[trained], inputs.old_logprobs[trained])
    recorded_logprobs = [s.logprobs[1:][s.loss_mask[1:]] for s in _samples(log, plan)]
    logprobs = torch.cat([inputs.behaviour[inputs.mask] for inputs in seen])
    assert logprobs.tolist() == np.concatenate(recorded_logprobs).tolist()
    assert replay_step(log, 0, trust_parts=True).bit_for_bit


def _samples(log: Store, plan: StepPlanned) -> list[Any]:
    samples = samples_at_cut(log, plan, "demo")
    return [samples[ref["turn_id"]] for ref in plan.samples]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"surrogate": "needy:typo"}, "surrogate 'needy:typo' needs 'entropie', which nothing gives: choose"),
        ({"surrogate": "needy:text"}, "its `needs` are 'entropy'; write a set of names"),
        ({"surrogate": "needy:old"}, "surrogate 'needy:old' needs 'old': set old = \"trainer\""),
        ({"surrogate": "needy:values"}, "needs 'values': only name = \"ppo\" has a critic"),
        ({"baseline": "needy:pairs"}, "baseline 'needy:pairs' needs 'pairs': a policy gradient has none"),
        (
            {"name": "reinforce_plus_plus", "group_size": 1, "surrogate": "needy:groups"},
            "surrogate 'needy:groups' needs 'groups': set group_size above 1",
        ),
    ],
)
def test_a_need_that_cannot_be_met(module: Callable[[str, str], Path], keys: Any, reason: str) -> None:
    """It is said when the CONFIG is read, with what to set."""
    module("needy", NEEDY)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        fabric.config(fabric.GRPO, algorithm=POLICY_GRADIENT | keys)


def test_needs_that_are_met_otherwise(module: Callable[[str, str], Path]) -> None:
    """By a key that is set, or by an algorithm that has a critic."""
    module("needy", NEEDY)
    keys = {"surrogate": "needy:old", "old": "trainer"}
    assert "old" in fabric.config(fabric.GRPO, algorithm=POLICY_GRADIENT | keys).algorithm.needs
    fabric.config(fabric.GRPO, algorithm={"name": "ppo", "surrogate": "needy:values"})


def test_an_algorithm_that_needs_what_nothing_gives(module: Callable[[str, str], Path]) -> None:
    """Of one's own: its needs are held against those that there are."""
    module("needless_algorithm", ALGORITHM.replace('{"rewards"}', '{"reward"}'))
    with pytest.raises(
        ConfigError, match="'needless_algorithm:Mine' needs 'reward', which nothing gives: choose"
    ):
        fabric.config(fabric.GRPO, algorithm={"name": "needless_algorithm:Mine"})
