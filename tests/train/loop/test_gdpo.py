"""Rewards of several sources: what is trained on, what a step records of them, and that it replays."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.cli.train.plot import Wanted, read_curves
from rollbook.replay.step.step import replay_step
from rollbook.replay.what_if.changes import Changes
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import RewardAssigned, SampleDropped, StepCommitted, StepPlanned
from rollbook.train.batches import manifest_batch
from rollbook.train.batches.experience import Scores
from rollbook.train.batches.manifest_batch import experience_at, samples_at_cut
from rollbook.train.curves.reporter import Following, read_points
from rollbook.train.doctor.preflight import read_recorded, rewards
from rollbook.train.select.samples import samples_of

WEIGHTS = {"correct": 1.0, "brief": 0.5}
GIVEN = {
    "a": ((1.0, 0.0), (0.0, 2.0), (1.0, 1.0), (0.0, None)),
    "b": ((1.0, 0.0), (0.5, 1.0), (0.0, 2.0), (1.0, 0.0)),
    "c": ((1.0, 3.0), (1.0, 3.0), (1.0, 3.0), (1.0, 3.0)),
    "d": ((0.0, 1.0), (None, None), (1.0, 0.0), (None, 2.0)),
}
"""Group -> what `correct` and `brief` gave each of its trajectories. All weighted sums of b are equal to one
another or nearly so, and its sources are not; all of c are equal; d1 has none."""


def _rewarded(path: Path, given: Any = GIVEN) -> Store:
    log = rb.open(path, create=True)
    records: list[Any] = []
    for group, members in given.items():
        for i, (correct, brief) in enumerate(members):
            name = f"{group}{i}"
            # What the sources sum up to in front of the recipe is a reward of its own, which is not read.
            records += fabric.records(name, [fabric.T([5, 6], [20 + i, 21])], group=group, reward=99.0)
            records += [RewardAssigned(name, None, 7.0, "correct")] if correct is not None else []
            for source, reward in (("correct", correct), ("brief", brief)):
                records += [] if reward is None else [RewardAssigned(name, None, reward, source)]
    fabric.append(log, records)
    return log


def _config(algorithm: dict[str, Any] | None = None, recipe: Any = None, **changes: Any) -> Any:
    keys = {"name": "gdpo", "group_size": 4, "groups": 2} | (algorithm or {})
    weighed = {"reward_weights": WEIGHTS} | (recipe or {})
    settings = {"steps": 1, "micro_batch_size": 4, "algorithm": keys, "recipe": weighed} | changes
    return fabric.config(fabric.GRPO, **settings)


def _advantages(log: Store, step: int = 0) -> dict[str, float]:
    plan = records_of(log, StepPlanned)[step]
    experience = experience_at(plan, samples_at_cut(log, plan, "demo"), lambda *_: Scores())
    names = [sample.trajectory_id for sample in experience.samples]
    return dict(zip(names, experience.advantages.values.tolist(), strict=True))


def test_each_source_by_itself(tmp_path: Path) -> None:
    """Groups whose sources differ are trained on, also where all sums are equal; the advantages are those of
    the log's rewards, and steps replay."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, _config({"groups": 1}, steps=3))
    used = [[ref["trajectory_id"] for ref in plan.samples] for plan in records_of(log, StepPlanned)]
    assert used == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"], ["d0", "d2", "d3"]]
    drops = {(drop.trajectory_id, drop.rule) for drop in records_of(log, SampleDropped)}
    assert drops == {*((f"c{i}", "zero_variance") for i in range(4)), ("d1", "no_reward")}
    half, root = 1 / math.sqrt(2), math.sqrt(3) / 2
    # correct: 1, 0, 1, 0 of deviation 1 / sqrt(3); brief: 0, 2, 1 of deviation 1, and nothing.
    sums = np.array([root - 0.5, -root + 0.5, root, -root])
    assert [*_advantages(log, 0).values()] == pytest.approx((sums / sums.std(ddof=1)).tolist(), abs=1e-5)
    # correct: 0, 1 and nothing; brief: 1, 0, 2 of deviation 1.
    sums = np.array([-half, half - 0.5, 0.5])
    expected = ((sums - sums.mean()) / sums.std(ddof=1)).tolist()
    assert [*_advantages(log, 2).values()] == pytest.approx(expected, abs=1e-5)
    for step in range(3):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in


def test_the_sum_for_all_others(tmp_path: Path) -> None:
    """`grpo` takes the weighted sums: so b is flat, and the rewards of samples are the sums."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, _config({"name": "grpo", "groups": 1}, steps=2))
    plans = records_of(log, StepPlanned)
    assert [plan.samples[0]["trajectory_id"] for plan in plans] == ["a0", "d0"]
    sums = [s.reward for s in samples_at_cut(log, plans[0], "demo").values()]
    assert sums == [1.0, 1.0, 1.5, 0.0]
    assert replay_step(log, 1).bit_for_bit


def test_the_mean_of_each_source_is_a_metric(tmp_path: Path) -> None:
    """Of those that have one; in SQL, in curves while it trains and afterwards, and for `rollbook plot`."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, _config({"groups": 1}, steps=3))
    metrics = [step.metrics for step in records_of(log, StepCommitted)]
    assert [each["reward.correct"] for each in metrics] == [0.5, 0.625, 0.5]
    assert [each["reward.brief"] for each in metrics] == [1.0, 0.75, 1.0]
    assert metrics[0]["reward"] == (1.0 + 1.0 + 1.5 + 0.0) / 4
    query = """SELECT metrics->>'$."reward.brief"' FROM steps ORDER BY step"""
    assert [float(value) for (value,) in rb.connect(log.path).execute(query).fetchall()] == [1.0, 0.75, 1.0]
    points = read_points(log, log.head(), "demo", "actor")
    assert [point.values["metrics/reward.brief"] for point in points] == [1.0, 0.75, 1.0]
    following = Following("actor", 0)
    made = [following.point(event.record) for event in log.events()]
    lived = [point for point in made if point is not None]
    assert [point.values["metrics/reward.brief"] for point in lived] == [1.0, 0.75, 1.0]
    curves = read_curves(log, log.head(), Wanted([], "actor", ["loss", "reward.brief"], "step", 0))
    assert {curve.metric: len(curve.points) for curve in curves} == {"loss": 3, "reward.brief": 3}
    assert curves[1].points == [(0, 1.0), (1, 0.75), (2, 1.0)]


def test_one_sources_forged_reward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the sum is the same, and though the advantages are."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, _config({"groups": 1}))

    def forged(*args: Any, **keys: Any) -> Iterator[Any]:
        for sample in samples_of(*args, **keys):
            brief, correct = sample.reward_parts
            if brief is not None and correct is not None:
                sample = replace(sample, reward_parts=(brief + 2.0, correct - 1.0))
            yield sample

    monkeypatch.setattr(manifest_batch, "samples_of", forged)
    result = replay_step(log, 0)
    assert result.differs_in == "rewards"
    assert result.stages["rewards"].place is not None
    assert result.stages["rewards"].place.sample == 0


def test_a_reward_that_comes_later_changes_no_step(tmp_path: Path) -> None:
    """A step is of its cut; another training goes by the newest, and without what they supersede."""
    log = _rewarded(tmp_path / "store", {"a": GIVEN["a"], "b": GIVEN["b"]})
    fabric.train(log, _config({"groups": 1}))
    fabric.append(log, [RewardAssigned("a0", None, -3.0, "brief"), RewardAssigned("b0", None, 4.0, "brief")])
    assert replay_step(log, 0).bit_for_bit
    fabric.train(log, _config({"groups": 1}, optimizer={"lr": 0.01}))
    plan = records_of(log, StepPlanned)[1]
    parts = {name: sample.reward_parts for name, sample in samples_at_cut(log, plan, "demo").items()}
    assert parts["b0.0"] == (4.0, 1.0)


def test_the_tail_waits_for_a_first_reward(tmp_path: Path) -> None:
    """Of any of the sources, as it does where there is one."""
    log = _rewarded(tmp_path / "store", {"a": ((1.0, 0.0), (0.0, 1.0), (None, None), (1.0, 1.0))})
    given = threading.Timer(0.5, fabric.append, (log, [RewardAssigned("a2", None, 0.5, "brief")]))
    given.start()
    fabric.train(log, _config({"groups": 1}, admission={"wait_s": 30}), "tail")
    given.join()
    plan = records_of(log, StepPlanned)[0]
    assert [ref["trajectory_id"] for ref in plan.samples] == ["a0", "a1", "a2", "a3"]
    assert samples_at_cut(log, plan, "demo")["a2.0"].reward_parts == (0.5, None)
    assert replay_step(log, 0).bit_for_bit


def test_several_steps_on_a_rollout_batch(tmp_path: Path) -> None:
    """A part of its samples each, with what each source gave them; tokens that are rejected take nothing of
    it away."""
    log = _rewarded(tmp_path / "store")
    rejecting = {"old": "trainer", "correction": "icepop", "correction_high": 0.03, "count_rejected": False}
    fabric.train(log, _config({"mini_batches": 2} | rejecting, steps=2))
    metrics = [step.metrics for step in records_of(log, StepCommitted)]
    assert 0 < metrics[0]["rejected"] < 1
    assert sum(4 * each["reward.correct"] for each in metrics) == 0.5 * 4 + 0.625 * 4
    assert [replay_step(log, step).bit_for_bit for step in (0, 1)] == [True, True]


def test_another_source_in_place_of_several(tmp_path: Path) -> None:
    """As a what-if asks: it takes the place of all, which gdpo cannot do without."""
    log = _rewarded(tmp_path / "store")
    fabric.train(log, _config({"name": "grpo", "groups": 1}))
    [plan] = records_of(log, StepPlanned)
    recipe = Changes(source="judge").rule(plan).recipe
    assert (recipe.reward_source, recipe.reward_weights) == ("judge", None)
    taken_apart = Changes(source="judge", overrides=["algorithm.name=gdpo"])
    with pytest.raises(ConfigError, match=r"name the sources by recipe\.reward_weights"):
        taken_apart.rule(plan)


def test_preflight_knows_the_sources(tmp_path: Path) -> None:
    """It judges the sums, and names all sources where none gave anything."""
    log = _rewarded(tmp_path / "store")
    settings = _config({"groups": 1})
    checks = {
        check.name: check for check in rewards(settings, read_recorded(log, log.head(), settings), "cut")
    }
    assert checks["rewards"].said.startswith("from source 'brief' and 'correct': 15")
    other = _config(recipe={"reward_weights": {"x": 1.0, "y": 1.0}})
    [check] = rewards(other, read_recorded(log, log.head(), other), "cut")
    assert (check.verdict, check.lever) == ("red", "recipe.reward_weights")
    assert check.said.startswith("none from source 'x' and 'y' (there are: ")
