"""Faults that are planted in the code while a step is taken: its replay by the code as it is names the stage.

Each is one that trainers were seen to have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store
from rollbook.store.events import RewardAssigned
from rollbook.train.algorithms import policy_gradient, surrogates
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.materialize import Materializer
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.select import recipe
from rollbook.train.step import experiences, metrics
from rollbook.train.step.experiences import Experiences
from rollbook.train.step.step import PolicyLoss

Stores = Callable[..., Store]
STEP = 12
"""The first step that is taken here: the trained store has those before."""


def _taken(log: Store, plant: Callable[[pytest.MonkeyPatch], None], *more: Any, **changes: Any) -> StepReplay:
    """The replay of the last step of a training that ran with a fault."""
    fabric.append(log, [*fabric.rollout_records(2, 4, first=6, version=12), *more])
    settings = fabric.config(fabric.GRPO, **({"seed": 5, "steps": 1} | changes))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        fabric.train(log, settings)
    return replay_step(log, max(fabric.steps_of(log).steps))


def _wrong_set(patch: pytest.MonkeyPatch) -> None:
    """Rewards normalized over the whole batch, not over the group."""
    right = policy_gradient.trajectory_advantages

    def wrong(rewards: Any, groups: Any, *rest: Any) -> Any:
        return right(rewards, np.zeros_like(groups), *rest)

    patch.setattr(policy_gradient, "trajectory_advantages", wrong)


def _biased(patch: pytest.MonkeyPatch) -> None:
    """A standard deviation over n in the place of one over n - 1."""
    right = policy_gradient.trajectory_advantages

    def wrong(*given: Any) -> Any:
        return right(*given) * np.sqrt(4 / 3)

    patch.setattr(policy_gradient, "trajectory_advantages", wrong)


def _own_denominator(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch's loss divided by its own tokens, not by the batch's."""
    right = PolicyLoss.__call__

    def wrong(self: Any, outputs: Any, micro: Any) -> Any:
        loss, kept = right(self, outputs, micro)
        return loss * self.divisor / max(int(micro.loss_mask[:, 1:].sum()), 1), kept

    patch.setattr(PolicyLoss, "__call__", wrong)


def _clip_sign(patch: pytest.MonkeyPatch) -> None:
    """The lower bound of the ratio at 1 + l."""
    right = surrogates._clipped

    def wrong(ratio: Any, inputs: Any, clips: Any) -> Any:
        return right(ratio, inputs, replace(clips, low=-clips.low))

    patch.setattr(surrogates, "_clipped", wrong)


def _inverted_staleness(patch: pytest.MonkeyPatch) -> None:
    """What is fresh is dropped, and what is stale is kept."""

    def wrong(candidate: Any, held: Any) -> Any:
        return candidate.deciding >= held.version - held.recipe.max_staleness

    patch.setitem(recipe.RULES, "staleness", replace(recipe.RULES["staleness"], drops=wrong))


def _shifted_schedule(patch: pytest.MonkeyPatch) -> None:
    """Each step has the learning rate of the one after it."""
    right = TrainablePolicy.learning_rate

    def wrong(self: Any, step: int, steps: int | None = None) -> Any:
        return right(self, step + 1, steps)

    patch.setattr(TrainablePolicy, "learning_rate", wrong)


def _wrong_metric(patch: pytest.MonkeyPatch) -> None:
    """The mean reward as a sum."""
    right = metrics.of_batch

    def wrong(batch: Any) -> Any:
        values = right(batch)
        return values | {"reward": values["reward"] * len(batch.samples)}

    patch.setattr(metrics, "of_batch", wrong)


def _first_reward(patch: pytest.MonkeyPatch) -> None:
    """The reward of g6.1 as it was before it was superseded."""
    right = Materializer.samples

    def wrong(self: Any, wanted: Any) -> Any:
        return [
            replace(sample, reward=0.5) if sample.trajectory_id == "g6.1" else sample
            for sample in right(self, wanted)
        ]

    patch.setattr(Materializer, "samples", wrong)


def _current_for_old(patch: pytest.MonkeyPatch) -> None:
    """Importance weights to the policy in training, in the place of that of the batch's beginning."""
    right = Experiences.batch

    def wrong(self: Any, plan: Any, samples: Any) -> Any:
        if plan.rollout_batch["number"]:
            held, algorithm = self._held, recorded_algorithm(plan.algorithm)
            parts = [[[i] for i in range(len(held.samples))]]
            args = (algorithm, held.samples, held.masks, parts, self._references)
            now = experiences.score(self._policy, *args, packed=False)().old_logprobs
            rollout = np.concatenate([s.logprobs[m] for s, m in zip(held.samples, held.masks, strict=True)])
            weights = algorithm.weights(now.astype(np.float64) - rollout, np.diff(held.ends))
            self._held = replace(held, weights=weights)
        return right(self, plan, samples)

    patch.setattr(Experiences, "batch", wrong)


@pytest.mark.more_but("_biased*", "_clip_sign*")
@pytest.mark.parametrize(
    ("plant", "stage"),
    [
        (_wrong_set, "advantages"),
        (_biased, "advantages"),
        (_own_denominator, "gradients"),
        (_clip_sign, "losses"),
        (_shifted_schedule, "schedule"),
        (_wrong_metric, "metrics"),
    ],
)
def test_a_fault_is_named_by_its_stage(trained: Stores, plant: Any, stage: str) -> None:
    """The stage in which the fault is comes first among those that differ."""
    result = _taken(trained(), plant)
    assert (result.step, result.differs_in) == (STEP, stage)


@pytest.mark.more
def test_without_a_fault_nothing_differs(trained: Stores) -> None:
    """The same training without one."""
    assert _taken(trained(), lambda patch: None).bit_for_bit


def test_an_inverted_rule_is_a_wrong_selection(trained: Stores) -> None:
    """Samples that the recipe drops were trained on, and those that it keeps dropped."""
    stale = fabric.rollout_records(2, 4, first=8, version=3)
    recipe_ = {"splits": ["train"], "max_staleness": 2}
    sft = {"name": "sft", "batch_size": 4}
    result = _taken(trained(), _inverted_staleness, *stale, recipe=recipe_, algorithm=sft)
    assert result.differs_in == "selection"
    place = result.stages["selection"].place
    assert place is not None
    assert place.key == "samples[0]"


def test_a_reward_before_its_supersession(trained: Stores) -> None:
    """The step trained on a reward that a later one had superseded at its cut."""
    first = RewardAssigned("g6.1", None, 3.5, "agent")
    result = _taken(trained(), _first_reward, first)
    assert result.differs_in == "rewards"
    place = result.stages["rewards"].place
    assert place is not None
    assert place.trajectory_id == "g6.1"


@pytest.mark.more
def test_weights_to_the_policy_in_training(trained: Stores) -> None:
    """Truncated importance sampling with current logprobs in the place of old ones, seen at the second step
    on a batch."""
    algorithm = {
        "name": "policy_gradient",
        "groups": 2,
        "group_size": 4,
        "mini_batches": 2,
        "old": "trainer",
        "correction": "tis",
    }
    result = _taken(trained(), _current_for_old, steps=2, algorithm=algorithm)
    assert (result.step, result.differs_in) == (STEP + 1, "importance_weights")
