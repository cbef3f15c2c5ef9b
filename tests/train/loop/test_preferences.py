"""Direct preference optimization: which pairs are trained on, that it learns, and that its steps replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, IdleError, TrainError
from rollbook.store.events import PreferenceAdded, SampleDropped, StepCommitted, StepPlanned
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.train.batches.units import apply_recipe
from rollbook.train.config.config import parse_config

Stores = Callable[..., Store]
FROM_REWARDS = {"name": "dpo", "pairs": "rewards", "group_size": 4, "batch_size": 2, "beta": 0.5}
STEADY = {"lr": 0.01}


def _used(log: Store) -> list[list[str]]:
    """The trajectories of each step, in their order."""
    return [[ref["trajectory_id"] for ref in plan.samples] for plan in records_of(log, StepPlanned)]


def _dropped(log: Store) -> Counter[str]:
    return Counter(drop.rule for drop in records_of(log, SampleDropped))


def _rewarded(path: Path) -> Store:
    """Four groups of four trajectories: three whose rewards differ, and one of equal rewards. Trajectory a2
    branches."""
    log = rb.open(path, create=True)
    records: list[Any] = []
    for group, rewards in (
        ("a", (0, 3, 9, 1)),
        ("b", (2, 2, 1, 0)),
        ("c", (1, 1, 1, 1)),
        ("d", (0, 1, 1, 0)),
    ):
        for i, reward in enumerate(rewards):
            turns = [fabric.T([5, 6 + i], [20 + 5 * reward, 21]), fabric.T([9], [40 + i], 0)]
            turns += [fabric.T([8], [50], 0)] if (group, i) == ("a", 2) else []
            records += fabric.records(f"{group}{i}", turns, group=group, reward=float(reward))
    fabric.append(log, records)
    return log


def test_the_best_and_the_worst_of_each_group(tmp_path: Path) -> None:
    """Chosen before rejected, the first of equal ones; all else is dropped by a rule."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.GRPO, steps=2, micro_batch_size=2, algorithm=FROM_REWARDS))
    assert _used(log) == [["a1", "a0", "b0", "b3"], ["d1", "d0"]]
    assert _dropped(log) == {"several_paths": 2, "unpaired": 5, "zero_variance": 4}
    assert [replay_step(log, step).bit_for_bit for step in (0, 1)] == [True, True]
    first = records_of(log, StepCommitted)[0].metrics
    assert (first["preference_accuracy"], first["preference_margin"]) == (0.0, 0.0), (
        "policy and reference agree"
    )


@pytest.mark.more
def test_the_tail_gives_the_same_pairs(tmp_path: Path) -> None:
    """Online, as at a cut."""
    log = _rewarded(tmp_path / "store")
    settings = fabric.config(fabric.GRPO, steps=2, micro_batch_size=4, algorithm=FROM_REWARDS)
    with pytest.raises(IdleError):  # the fourth group gives no pair, so that the second step ends
        fabric.train(log, settings.model_copy(update={"steps": 3, "idle_timeout_s": 0.3}), "tail")
    assert _used(log) == [["a1", "a0", "b0", "b3"], ["d1", "d0"]]


def _preferred(path: Path) -> Store:
    """Twelve conversations of a teacher, of which a person prefers the second half to the first; e is of the
    split eval, and x is not in the log."""
    log = rb.open(path, create=True)
    records: list[Any] = []
    for i in range(12):
        turn = fabric.T([5, 6 + i % 3], [20 if i < 6 else 60, 21 + i % 2], logprobs=None, version=None)
        records += fabric.records(f"t{i:02}", [turn], split="teacher")
    records += fabric.records("e", split="eval")
    records += [PreferenceAdded(f"t{i + 6:02}", f"t{i:02}", 1.0, "a person") for i in range(6)]
    records += [PreferenceAdded("t06", "e"), PreferenceAdded("t07", "x")]
    records.append(PreferenceAdded("t00", "t06", source="b"))
    fabric.append(log, records)
    return log


OFFLINE = {
    "steps": 6,
    "micro_batch_size": 4,
    "checkpoint_every": 4,
    "algorithm": {"name": "dpo", "batch_size": 3, "beta": 0.5},
    "recipe": {"splits": ["teacher"], "preference_sources": ["a person", "label"]},
    "optimizer": STEADY,
}


def test_recorded_preferences_in_epochs(tmp_path: Path) -> None:
    """Each pair once an epoch; the loss falls, and the policy comes to rate as the person does; no source
    counts that the recipe leaves out."""
    log = _preferred(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.GRPO, **OFFLINE))
    used = _used(log)
    pairs = [list(zip(step[::2], step[1::2], strict=True)) for step in used]
    all_of_them = {(f"t{i + 6:02}", f"t{i:02}") for i in range(6)}
    for first in range(0, 6, 2):
        assert len(pairs[first]) == 3
        assert {*pairs[first], *pairs[first + 1]} == all_of_them
    metrics = [step.metrics for step in records_of(log, StepCommitted)]
    assert metrics[0]["loss"] == pytest.approx(math.log(2))
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    assert metrics[-1]["preference_accuracy"] == 1.0
    assert metrics[-1]["preference_margin"] > 0.5
    assert _dropped(log) == {}
    rows = rb.connect(log.path).execute("select preference_accuracy from metrics order by step").fetchall()
    assert rows[-1] == (1.0,)
    assert [replay_step(log, step).differs_in for step in (1, 5)] == [None, None]


@pytest.mark.parametrize("algorithm", [{"name": "simpo", "beta": 4.0}, {"name": "orpo", "odds_weight": 1.0}])
def test_preferences_without_a_reference(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The policy comes to rate as the person does, and steps replay. None names a reference."""
    log = _preferred(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.GRPO, **OFFLINE | {"algorithm": algorithm | {"batch_size": 6}}))
    metrics = [step.metrics for step in records_of(log, StepCommitted)]
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
    assert metrics[-1]["preference_accuracy"] == 1.0
    assert metrics[-1]["preference_margin"] > metrics[0]["preference_margin"] + 0.5
    assert all("reference_weights" not in plan.input_digests for plan in records_of(log, StepPlanned))
    assert replay_step(log, 5).differs_in is None


def test_a_side_that_is_missing_breaks_a_pair(tmp_path: Path) -> None:
    """Erased, of another split, or not in the log: the other side is a drop, unless another pair has it."""
    log = _preferred(tmp_path / "store")
    for name in ("t00", "t01"):
        erase_trajectory(log, name, "asked")
    applied = apply_recipe(
        log,
        log.head(),
        "demo",
        "actor",
        parse_config({"model": "m", **OFFLINE}, "c").recipe,
        parse_config({"model": "m", **OFFLINE}, "c").algorithm,
    )
    assert applied.pairs is not None
    assert [(a.name, b.name) for a, b in applied.pairs] == [(f"t{i + 6:02}", f"t{i:02}") for i in range(2, 6)]
    assert {(drop.sample.trajectory_id, drop.rule) for drop in applied.drops} == {
        *(("t00", "erased"), ("t01", "erased"), ("t06", "pair_broken"), ("t07", "pair_broken"))
    }


@pytest.mark.more
def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    """The same steps as without it."""
    whole, broken = (_preferred(tmp_path / name) for name in ("whole", "broken"))
    settings = fabric.config(fabric.GRPO, **OFFLINE)
    fabric.train(whole, settings)
    with fabric.killed_at(2):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    expected, other = ([step.digests for step in records_of(log, StepCommitted)] for log in (whole, broken))
    assert expected == other


def test_without_preferences(tmp_path: Path) -> None:
    """The message says what there is instead."""
    log = rb.open(tmp_path / "store", create=True)
    fabric.append(log, fabric.teacher_records(3))
    with pytest.raises(TrainError, match="3 are in no recorded preference of which"):
        fabric.train(log, fabric.config(fabric.GRPO, **OFFLINE))


def test_an_odd_micro_batch_would_part_a_pair() -> None:
    """It is refused, and named."""
    with pytest.raises(
        ConfigError, match="micro_batch_size 5: the samples of a pair lie in one forward pass"
    ):
        fabric.config(fabric.GRPO, algorithm=FROM_REWARDS)


def test_nothing_to_pair(tmp_path: Path) -> None:
    """The message says what became of the trajectories."""
    log = rb.open(tmp_path / "store", create=True)
    records = [r for i in range(4) for r in fabric.records(f"a{i}", group="a", reward=1.0)]
    fabric.append(log, records)
    with pytest.raises(Exception, match="4 are in groups whose rewards are all equal"):
        fabric.train(log, fabric.config(fabric.GRPO, micro_batch_size=2, algorithm=FROM_REWARDS))
