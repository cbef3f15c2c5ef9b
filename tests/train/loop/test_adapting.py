"""Keys that adapt: in each manifest as the step used them, over restarts, and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.algorithms.policy_gradient import adapted

Stores = Callable[..., Store]
ADAPTING = {
    "name": "rloo",
    "groups": 2,
    "group_size": 4,
    "kl": 0.5,
    "kl_target": 1e-6,
    "kl_horizon": 16,
    "reward_normalization": "running",
}


def test_each_step_follows_from_the_one_before(recorded: Stores) -> None:
    """The first with the configuration's; a restart in between changes nothing; steps replay."""
    whole, broken = recorded("whole"), recorded("broken")
    fabric.train(whole, fabric.config(fabric.GRPO, algorithm=ADAPTING))
    for steps in (1, 2, 3):
        fabric.train(broken, fabric.config(fabric.GRPO, algorithm=ADAPTING, steps=steps))
    plans, steps_of = records_of(whole, StepPlanned), records_of(whole, StepCommitted)
    assert [p.algorithm for p in plans] == [p.algorithm for p in records_of(broken, StepPlanned)]
    assert [s.digests for s in steps_of] == [s.digests for s in records_of(broken, StepCommitted)]
    assert (plans[0].algorithm["kl"], plans[0].algorithm["reward_moments"]) == (0.5, None)
    for before, done, plan in zip(plans, steps_of, plans[1:], strict=False):
        args = (before.algorithm["kl"], done.metrics["kl"], 1e-6, done.metrics["samples"], 16)
        assert plan.algorithm["kl"] == pytest.approx(adapted(*args))
    counts = [plan.algorithm["reward_moments"][0] for plan in plans[1:]]
    assert counts == [8, 16], "each trajectory once, of which some have two samples"
    assert steps_of[0].metrics["samples"] > 8
    assert len({plan.algorithm["kl"] for plan in plans}) == 3
    assert [replay_step(whole, step).differs_in for step in (0, 2)] == [None, None]


def test_a_reward_clip_trains(recorded: Stores) -> None:
    """Keys that are lists in a manifest are read back from it."""
    log = recorded()
    algorithm = {"name": "rloo", "groups": 2, "group_size": 4, "reward_clip": [0.0, 1.0]}
    fabric.train(log, fabric.config(fabric.GRPO, algorithm=algorithm, steps=1))
    assert replay_step(log, 0).bit_for_bit
