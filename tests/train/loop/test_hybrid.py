"""Rollout batches that are scored as they come: the numbers of batches that are scored whole, and the same
bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted, StepPlanned

Stores = Callable[..., Store]
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "groups": 3, "group_size": 4, "kl": 0.1, "old": "trainer"}},
    "decoupled_ppo": {
        "algorithm": {"name": "decoupled_ppo", "groups": 3, "group_size": 4, "mini_batches": 2}
    },
    "ppo": {"algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2, "kl": 0.1}, "critic": {"lr": 0.01}},
}


@pytest.mark.more_but("grpo-False")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_the_update_is_one_over_all(recorded: Stores, name: str, packed: bool) -> None:
    """Samples, losses, gradients and weights are those of a batch that is awaited whole; the manifest says in
    which parts it was scored, and steps replay."""
    logs = [recorded("async"), recorded("hybrid")]
    changes = {"steps": 2, "checkpoint_every": 9} | TRAININGS[name] | (PACKED if packed else {})
    for log, mode in zip(logs, ("async", "hybrid"), strict=True):
        settings = fabric.config(fabric.GRPO, **changes, mode=mode, num_iters_per_train_update=3)
        fabric.train(log, settings, "tail")
    whole, parts = (records_of(log, StepPlanned) for log in logs)
    assert [plan.samples for plan in parts] == [plan.samples for plan in whole]
    first = parts[0].rollout_batch
    assert len(first["iterations"]) == 3
    assert sum(first["iterations"]) == len(first["samples"])
    assert all(plan.rollout_batch is None or "iterations" not in plan.rollout_batch for plan in whole)
    for ours, theirs in zip(*(records_of(log, StepCommitted) for log in logs), strict=True):
        for key, value in fabric.computed(ours.metrics).items():
            expected = value if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)
            assert theirs.metrics[key] == expected, key
    assert [replay_step(logs[1], step).differs_in for step in (0, 1)] == [None, None]
