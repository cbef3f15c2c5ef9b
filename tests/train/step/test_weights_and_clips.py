"""What a step's metrics say of clips and weights, by hand and of trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted
from rollbook.store.sql.query import connect
from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.experience import Scores, experience_of
from rollbook.train.select.samples import Sample

RATIOS = (0.5, 1.0, 1.5, 4.0)


def _inputs() -> LossInputs:
    """Each ratio with advantage 1 in the first row, -1 in the second."""
    logprobs = torch.tensor([RATIOS, RATIOS]).double().log()
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4]).double()
    return LossInputs.whole(logprobs, torch.zeros_like(logprobs), advantages, logprobs < math.inf)


@pytest.mark.parametrize(
    ("keys", "low", "high"),
    [
        ({}, [[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]]),
        ({"surrogate": "cispo"}, [[1, 0, 0, 0], [1, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 1, 1]]),
        ({"name": "cispo"}, [[0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 1, 1]]),
    ],
)
def test_where_clips_are_at_work(keys: dict[str, Any], low: Any, high: Any) -> None:
    """Of CISPO they clip the weights of good and bad tokens alike, which keep their gradients."""
    masks = recorded_algorithm({"name": "policy_gradient"} | keys).clipped(_inputs())
    assert masks is not None
    assert [mask.int().tolist() for mask in masks] == [low, high]


def test_where_the_dual_clip_is_at_work() -> None:
    """Where a bad token's ratio is above it; they have no gradient; without it there is no number."""
    algorithm = recorded_algorithm({"name": "policy_gradient", "dual_clip": 3.0})
    inputs = _inputs()
    inputs.logprobs.requires_grad_()
    assert algorithm.measures(inputs)["clipped_dual"].tolist() == [False] * 7 + [True]
    [gradient] = torch.autograd.grad(algorithm.loss(inputs).sum(), [inputs.logprobs])
    assert gradient[1].tolist()[3] == 0
    assert gradient[1].tolist()[2] != 0
    assert recorded_algorithm({"name": "policy_gradient"}).measures(inputs) == {}
    assert recorded_algorithm({"name": "cispo", "dual_clip": 3.0}).measures(inputs) == {}


def _sample(logprobs: list[float]) -> Sample:
    count = len(logprobs) + 1
    return Sample(
        *("r", "t", "t", "t.0", ("t.0",), (count,), "g", "train"),
        tokens=np.arange(count, dtype=np.int32),
        loss_mask=np.arange(count) > 0,
        logprobs=np.array([0.0, *logprobs], np.float32),
        versions=np.zeros(count, np.int64),
        temperatures=np.ones(count, np.float32),
        reward=1.0,
        rewards={},
    )


@pytest.mark.parametrize("counted", [True, False])
def test_tokens_that_are_left_out(counted: bool) -> None:
    """Ratios 1/4, 1, 3/2 and 4 of two samples, of which IcePop keeps the middle ones."""
    keys = {"correction": "icepop", "correction_low": 0.5, "old": "trainer", "count_rejected": counted}
    algorithm = recorded_algorithm({"name": "policy_gradient"} | keys)
    samples = [_sample([0.0, 0.0]), _sample([0.0, 0.0])]
    old = np.log(np.array([0.25, 1.0, 1.5, 4.0], np.float32))
    experience = experience_of(samples, algorithm, Scores(old_logprobs=old))
    assert experience.left_out.tolist() == ([0, 0] if counted else [1, 1])
    assert experience.part([1]).left_out.tolist() == ([0] if counted else [1])
    assert [int(mask.sum()) for mask in experience.masks] == ([2, 2] if counted else [1, 1])


@pytest.mark.more_but("False")
@pytest.mark.parametrize("counted", [True, False])
def test_of_a_training(recorded: Callable[..., Store], counted: bool) -> None:
    """The share that was rejected is the same, counted or not; the view of metrics has it; the step
    replays."""
    log = recorded()
    keys = {"name": "policy_gradient", "groups": 2, "group_size": 4, "old": "trainer", "dual_clip": 3.0}
    keys |= {"correction": "icepop", "correction_low": 0.5, "correction_high": 2.0}
    keys |= {"count_rejected": counted}
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=keys))
    [step] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    rejected, tokens = step.metrics["rejected"], step.metrics["trained_tokens"]
    assert 0 < rejected < 1
    whole = tokens if counted else tokens / (1 - rejected)
    assert whole == pytest.approx(round(whole))
    assert rejected * whole == pytest.approx(round(rejected * whole))
    assert 0 < step.metrics["weight_mean"] < 2 * (1 - rejected)
    with connect(log.path) as connection:
        query = "SELECT rejected, weight_mean, clipped_dual, trajectories FROM metrics"
        row = connection.execute(query).fetchone()
    assert row == (rejected, step.metrics["weight_mean"], step.metrics["clipped_dual"], 8)
    assert replay_step(log, 0).bit_for_bit


def test_without_weights_there_is_nothing_to_say(recorded: Callable[..., Store]) -> None:
    """And the columns are empty."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, steps=1))
    [step] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    assert not {"rejected", "weight_mean", "clipped_dual"} & set(step.metrics)
