"""Algorithms are data to everybody else: a third one works everywhere, and none is taken for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from key_tables import rows
from pydantic import create_model
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.ingest.admission.outstanding import training_of
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import RunOpened, StepCommitted, StepPlanned
from rollbook.train.algorithms import policy_gradient
from rollbook.train.algorithms.advantages import BASELINES
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.registry import ALGORITHMS, PolicyGradient, recorded_algorithm
from rollbook.train.algorithms.rollouts import Advantages, Rollouts
from rollbook.train.algorithms.sft import Sft
from rollbook.train.algorithms.surrogates import KL_ESTIMATORS, SURROGATES
from rollbook.train.config.config import parse_config


class Doubled(Algorithm):
    """REINFORCE on pairs of trajectories, twice as strong: no algorithm that anybody needs."""

    name: Literal["doubled"]
    """Says which algorithm it is."""
    samples: int = 4
    """Samples per step."""

    @property
    def needs(self) -> frozenset[Need]:
        """A reward."""
        return frozenset({"rewards"})

    @property
    def demand(self) -> Demand:
        """Samples, each by itself."""
        return Demand(self.samples)

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Twice the reward."""
        return Advantages(2 * rollouts.rewards)

    def loss(self, inputs: LossInputs) -> Any:
        """Minus the advantage-weighted logprob."""
        return -(inputs.logprobs * inputs.advantages)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Doubled:
    """A third algorithm, in the registry."""
    monkeypatch.setitem(ALGORITHMS, "doubled", Doubled)  # type: ignore[arg-type]
    return Doubled(name="doubled")


@pytest.fixture
def taught(recorded: Callable[..., Store], doubled: Doubled) -> Store:
    """A store in which two steps were trained with it."""
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=2).model_copy(update={"algorithm": doubled})
    fabric.train(log, settings)
    return log


def test_a_third_algorithm_trains_with_its_own_loss(taught: Store) -> None:
    """Its batches, advantages and demand are its own, and each of its steps replays bit for bit."""
    plans, steps = records_of(taught, StepPlanned), records_of(taught, StepCommitted)
    assert [plan.algorithm for plan in plans] == [{"name": "doubled", "samples": 4}] * 2
    assert [len(plan.samples) for plan in plans] == [4, 4]
    samples = {ref["trajectory_id"] for plan in plans for ref in plan.samples}
    rewards = [t.reward("agent") for name, t in taught.trajectories().items() if name in samples]
    assert steps[0].metrics["reward"] is not None
    assert set(rewards) >= {0.5}
    # Logprobs of a random model are near -4.6, so the loss is about 2 * 4.6 * the mean reward.
    assert steps[0].metrics["loss"] == pytest.approx(9.2 * steps[0].metrics["reward"], rel=0.7)
    assert "engine_logprob_gap" not in steps[0].metrics  # it does not need the engines' logprobs
    assert replay_step(taught, 1).bit_for_bit


def test_its_demand_is_recorded_and_read_by_admission(taught: Store) -> None:
    """`run.opened` says the numbers, and whoever admits reads them, of an algorithm it never heard of."""
    (opened,) = records_of(taught, RunOpened)[-1:]
    assert opened.config["demand"] == {"groups": 4, "group_size": 1, "epochs": 1, "mini_batches": 1}
    tail = opened.config | {"source": "tail", "recipe": {"max_staleness": 1, "splits": ["train"]}}
    training = training_of(RunOpened("train", tail))
    assert training is not None
    assert (training.policy.batch, training.group_size) == (4, 1)
    grouped = training_of(RunOpened("train", tail | {"demand": {"groups": 3, "group_size": 5}}))
    assert grouped is not None
    assert (grouped.policy.batch, grouped.group_size) == (3, 5)


def test_an_unknown_algorithm_is_an_error_everywhere(taught: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CONFIG, in a manifest, and in the replay of a step that another release recorded."""
    with pytest.raises(ConfigError, match=r"algorithm\.name: there is no 'grppo': did you mean grpo\?"):
        parse_config({"model": "m", "steps": 1, "algorithm": {"name": "grppo"}}, "test")
    with pytest.raises(TrainError, match=r"algorithm 'trpo' is unknown to this release \(sft, grpo"):
        recorded_algorithm({"name": "trpo"})
    with pytest.raises(TrainError, match="algorithm 'grpo', key 'dual_clap': unknown key"):
        recorded_algorithm({"name": "grpo", "dual_clap": 3})
    monkeypatch.delitem(ALGORITHMS, "doubled")  # type: ignore[arg-type]
    with pytest.raises(TrainError, match="algorithm 'doubled' is unknown to this release"):
        replay_step(taught, 0)


def _row_of(key: str, names: list[str]) -> str:
    """The row of the key on that page, if its registry had these names."""
    kind = create_model("Grown", **{key: (policy_gradient.part_key(names, "what it is"), names[0])})  # type: ignore[call-overload]
    [row] = rows(kind)
    assert '`"another"`' in row
    assert getattr(kind.model_validate({key: "another"}), key) == "another"
    return row


@pytest.mark.parametrize(
    ("key", "table", "others"),
    [
        ("baseline", BASELINES, []),
        ("surrogate", SURROGATES, []),
        ("correction", CORRECTIONS, ["none"]),
        ("kl_estimator", KL_ESTIMATORS, []),
        ("normalizer", NORMALIZERS, []),
    ],
)
def test_names_of_parts_are_those_of_their_registries(
    root: Path, key: str, table: Mapping[str, Any], others: list[str]
) -> None:
    """In the type of the key, in the order of the table, and so on the page of all keys; no list repeats
    them."""
    names, own = PolicyGradient.model_json_schema()["properties"][key]["anyOf"]
    assert names["enum"] == [*others, *table]
    assert "pattern" in own
    for name in names["enum"]:
        PolicyGradient.model_validate({"name": "policy_gradient", "old": "trainer", key: name})
    page = (root / "docs" / "configuration.md").read_text()
    listed = ", ".join(f'`"{name}"`' for name in names["enum"])
    assert f"| `{key}` | {listed} or text |" in page
    assert listed in _row_of(key, [*names["enum"], "another"])


def test_what_each_algorithm_says_of_itself() -> None:
    """Demand, needs and epochs, by which everybody else decides."""
    assert Sft(name="sft", batch_size=7).demand == Demand(7, 1)
    assert Grpo(name="grpo", groups=3, group_size=5).demand == Demand(3, 5)
    assert (Sft(name="sft").needs, Sft(name="sft").cycles) == (frozenset(), True)
    assert (Grpo(name="grpo").needs, Grpo(name="grpo").cycles) == ({"logprobs", "rewards", "groups"}, False)
    rollouts = Rollouts(np.array([np.nan, 3.0]), np.arange(2), np.arange(2), np.array([1, 2]))
    assert Sft(name="sft").advantages(rollouts).values.tolist() == [1.0, 1.0]
