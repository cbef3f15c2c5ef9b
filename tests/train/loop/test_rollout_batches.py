"""Several optimizer steps on one rollout batch: each with a manifest, all with the experience of its
beginning."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, SampleDropped, StepCommitted, StepPlanned
from rollbook.train.algorithms.algorithm import Demand
from rollbook.train.batches.batch import mini_batches

Stores = Callable[..., Store]
PPO = {"name": "decoupled_ppo", "groups": 2, "group_size": 4, "epochs": 2, "mini_batches": 2, "kl": 0.1}


class Killed(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def settings() -> Any:
    """Two rollout batches of two groups, four steps on each; a checkpoint is due every 3 steps."""
    return fabric.config(fabric.GRPO, steps=8, algorithm=PPO, checkpoint_every=3, micro_batch_size=3)


@pytest.fixture(scope="module")
def whole(recorded_path: Path, settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A training by these settings that nothing broke. Read it; never write."""
    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("whole") / "store"))
    fabric.train(log, settings)
    return log


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_each_epoch_is_a_permutation(count: int, epochs: int, parts: int, seed: int) -> None:
    """Parts of sizes that differ by one at most; every sample once in each epoch; one step takes all in
    order."""
    batches = mini_batches(count, Demand(1, 1, epochs, parts), seed)
    if epochs == parts == 1:
        assert batches == [list(range(count))]
    each = min(parts, count)
    assert len(batches) == epochs * each
    for epoch in range(epochs):
        mine = batches[epoch * each : (epoch + 1) * each]
        assert sorted(i for part in mine for i in part) == list(range(count))
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    assert mini_batches(count, Demand(1, 1, epochs, parts), seed) == batches


def test_each_step_has_a_manifest(whole: Store) -> None:
    """Each sample is consumed twice; the first manifest names all of the batch; checkpoints come between
    batches."""
    plans = records_of(whole, StepPlanned)
    entries = [plan.rollout_batch for plan in plans]
    assert [(entry["first_step"], entry["number"], entry["steps"]) for entry in entries] == [
        (first, number, 4) for first in (0, 4) for number in range(4)
    ]
    assert ["samples" in entry for entry in entries] == [True, False, False, False] * 2
    for first in (0, 4):
        batch = [ref["turn_id"] for ref in entries[first]["samples"]]
        used = Counter(ref["turn_id"] for plan in plans[first : first + 4] for ref in plan.samples)
        assert used == Counter(dict.fromkeys(batch, 2))
        assert {plan.cut for plan in plans[first : first + 4]} == {plans[first].cut}
    assert [plan.policy_version for plan in plans] == list(range(8))
    assert [c.policy_version for c in records_of(whole, CheckpointWritten)] == [0, 4, 8]
    weights = [step.digests["weights"] for step in records_of(whole, StepCommitted)]
    assert len(set(weights)) == 8


def test_ratios_are_taken_to_the_batchs_beginning(whole: Store) -> None:
    """The first step's ratio is 1 and its reference the run's model; the later ones move away from
    both."""
    metrics = [step.metrics for step in records_of(whole, StepCommitted)]
    for first in (0, 4):
        for ratio in ("ratio_min", "ratio_max"):  # other padding, other sums
            assert metrics[first][ratio] == pytest.approx(1, abs=1e-5)
        assert metrics[first]["old_kl"] < 1e-10 < metrics[first + 1]["old_kl"]
    assert metrics[0]["kl"] < 1e-10
    assert 0 < metrics[1]["kl"] < metrics[7]["kl"]
    digests = [step.digests for step in records_of(whole, StepCommitted)]
    assert all(
        {"proximal_logprobs", "reference_logprobs", "importance_weights"} <= each.keys() for each in digests
    )
    inputs = [plan.input_digests for plan in records_of(whole, StepPlanned)]
    assert {each["reference_weights"] for each in inputs} == {inputs[0]["input_weights"]}


@pytest.mark.more_but("3", "6")
@pytest.mark.parametrize("step", [0, 2, 3, 6])
def test_every_step_replays(whole: Store, step: int) -> None:
    """From the checkpoint before its rollout batch, with the same experience."""
    result = replay_step(whole, step)
    assert result.bit_for_bit, result.differs_in
    assert (result.from_version, result.reran) == (step // 4 * 4, list(range(step // 4 * 4, step + 1)))
    assert result.metrics == fabric.computed(fabric.steps_of(whole).steps[step].committed.metrics)


@pytest.mark.more_but("4")
@pytest.mark.parametrize("killed_at", range(1, 8))
def test_a_kill_in_the_middle_changes_nothing(
    recorded: Stores, whole: Store, settings: Any, killed_at: int
) -> None:
    """The restart goes on with the batch in hand: the same plans and weights as without the kill."""
    broken = recorded()
    with fabric.killed_at(killed_at, Killed):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    expected, actual = (fabric.steps_of(log).steps for log in (whole, broken))
    assert list(actual) == list(range(8))
    for step in range(8):
        assert actual[step].committed.digests == expected[step].committed.digests
        assert actual[step].planned.samples == expected[step].planned.samples
        assert actual[step].planned.attempt == (2 if step == killed_at else 1)
    assert replay_step(broken, 7).bit_for_bit


@pytest.mark.more
def test_abandoned_steps_free_the_whole_batch(recorded: Stores, settings: Any) -> None:
    """Another configuration cannot go on from the middle of a batch, only from before it, with all of its
    samples."""
    log = recorded()
    with fabric.killed_at(6, Killed):
        fabric.train(log, settings)
    begun = records_of(log, StepPlanned)[4].rollout_batch["samples"]
    other = fabric.config(fabric.GRPO, steps=2)
    with pytest.raises(TrainError, match="no checkpoint of version 6 to start from"):
        fabric.train(log, other)
    fabric.train(log, other, abandon_after=4)
    last = records_of(log, StepPlanned)[-2:]
    assert [(plan.step, plan.rollout_batch) for plan in last] == [(6, None), (7, None)]
    used = {ref["turn_id"] for plan in last for ref in plan.samples}
    assert {ref["turn_id"] for ref in begun} <= used
    assert replay_step(log, 7).bit_for_bit


def test_a_step_that_is_not_finite_leaves_the_rest(
    recorded: Stores, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples are dropped, the other mini-batches go on, and what was committed replays."""
    log = recorded()
    run_step = sys.modules["rollbook.train.loop.trainer"].run_step
    spoilt: list[int] = []

    def spoils(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        if not spoilt:
            spoilt.append(settings.version)
            for micro in batch.micro_batches:
                micro.advantages[micro.loss_mask] = np.nan
        return run_step(policy, settings, batch, **options)

    monkeypatch.setattr("rollbook.train.loop.trainer.run_step", spoils)
    fabric.train(log, settings.model_copy(update={"on_not_finite": "skip", "steps": 3}))
    plans = records_of(log, StepPlanned)
    assert [(p.step, p.attempt, p.rollout_batch["number"]) for p in plans] == [
        (0, 1, 0),
        (0, 2, 1),
        (1, 1, 2),
        (2, 1, 3),
    ]
    dropped = {d.turn_id for d in records_of(log, SampleDropped) if d.rule == "not_finite"}
    assert dropped == {ref["turn_id"] for ref in plans[0].samples}
    assert plans[1].rollout_batch["samples"] == plans[0].rollout_batch["samples"]
    assert replay_step(log, 2).bit_for_bit


def test_a_missing_reference_is_told_before_a_step_is_planned(recorded: Stores) -> None:
    """There is no checkpoint of version 7."""
    log = recorded()
    message = r"algorithm.reference_version 7: run 'demo' has no checkpoint of that version"
    with pytest.raises(TrainError, match=message):
        fabric.train(log, fabric.config(fabric.GRPO, algorithm=PPO | {"reference_version": 7}, steps=4))
    assert not records_of(log, StepPlanned)
