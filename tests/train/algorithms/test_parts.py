"""Parts of one's own, by `module:name`: they train, their source is recorded, and a replay asks before it
runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.replay.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.algorithms import parts

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


def _of(log: Store, kind: Any) -> list[Any]:
    return [event.record for event in log.events() if isinstance(event.record, kind)]


def _config(fabric: Any, **algorithm: Any) -> Any:
    return fabric.config(fabric.GRPO, steps=2, algorithm={"groups": 2, "group_size": 4} | algorithm)


def test_a_surrogate_of_ones_own(
    fabric: Any, recorded: Stores, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of REINFORCE's gradient; a replay is refused, until it is told to trust; another source is
    told."""
    file = module("own_surrogate", SURROGATE)
    ours, plain = recorded("ours"), recorded("plain")
    fabric.train(ours, _config(fabric, name="policy_gradient", surrogate="own_surrogate:halved"))
    fabric.train(plain, _config(fabric, name="policy_gradient", surrogate="reinforce"))
    norms = [_of(log, StepCommitted)[0].metrics["gradient_norm"] for log in (ours, plain)]
    assert norms[0] == pytest.approx(norms[1] / 2, rel=1e-5)
    digests = [plan.environment["parts"] for plan in _of(ours, StepPlanned)]
    assert [list(one) for one in digests] == [["own_surrogate:halved"]] * 2
    assert "parts" not in _of(plain, StepPlanned)[0].environment
    monkeypatch.setattr(parts, "_loaded", {})
    with pytest.raises(TrainError, match=r"code of its own, 'own_surrogate:halved'.*--trust-parts"):
        replay_step(ours, 1)
    result = replay_step(ours, 1, trust_parts=True)
    assert (result.bit_for_bit, result.environment) == (True, [])
    file.write_text(SURROGATE + "# another source\n")
    result = replay_step(ours, 1, trust_parts=True)
    assert result.environment[0].startswith("parts: recorded {'own_surrogate:halved'")


def test_an_algorithm_of_ones_own(
    fabric: Any, recorded: Stores, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file: it trains, resumes and replays; its keys are checked."""
    module("own_algorithm", ALGORITHM)
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=2, algorithm={"name": "own_algorithm:Mine", "scale": 0.5})
    fabric.train(log, settings)
    plans = _of(log, StepPlanned)
    assert [plan.algorithm for plan in plans] == [{"name": "own_algorithm:Mine", "scale": 0.5}] * 2
    assert [len(plan.samples) for plan in plans] == [4, 4]
    fabric.train(log, settings.model_copy(update={"steps": 3}))
    monkeypatch.setattr(parts, "_loaded", {})
    assert replay_step(log, 2, trust_parts=True).bit_for_bit
    with pytest.raises(ConfigError, match="scal: "):
        fabric.config(fabric.GRPO, algorithm={"name": "own_algorithm:Mine", "scal": 1})


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "policy_gradient", "surrogate": "no_such_module:f"}, "'no_such_module:f' cannot be loaded"),
        ({"name": "policy_gradient", "surrogate": "own_surrogate:g"}, "'own_surrogate:g' cannot be loaded"),
        ({"name": "own_surrogate:halved"}, "'own_surrogate:halved' is no subclass of"),
        ({"name": "policy_gradient", "surrogate": "ppo clip"}, "algorithm.surrogate"),
    ],
)
def test_what_cannot_be_loaded_is_said(fabric: Any, module: Any, algorithm: Any, said: str) -> None:
    """When the CONFIG is read, before anything is written."""
    module("own_surrogate", SURROGATE)
    with pytest.raises(ConfigError, match=said):
        _config(fabric, **algorithm) if algorithm["name"] == "policy_gradient" else fabric.config(
            fabric.GRPO, algorithm=algorithm
        )
