"""The tables of a CONFIG that watch a training: evaluation on held-out data, and early stopping."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollbook.store.config import Positive, Table
from rollbook.store.events import Json

HELD_OUT = "evaluation."
"""What the name of a metric of evaluations begins with, where a step has one of the same name."""
OF_AGENTS = frozenset({"reward", "success"})
"""The metrics of evaluations that are of agents: of one that is not whole they are those of a part."""


class EvaluationConfig(Table):
    """Evaluation on trajectories of split `eval`, which are never trained on.

    Each writes `eval.finished`: the loss, and what the algorithm measures, of held-out samples, where
    the algorithm learns from samples as they are (`sft`, `dpo`, `reward_model`); and of a policy the mean
    reward of the trajectories that agents finished with a reward since the evaluation before."""

    every: Positive = 50
    """Optimizer steps between evaluations. One comes before the first step, and one after the last."""
    wait_s: Annotated[float, Field(ge=0)] = 0.0
    """With --source tail: how long each waits for agents to be evaluated at its version, which `rollbook
    rollout --follow` does where its CONFIG has `[evaluation]`. Then the rewards are of this version alone."""
    source_runs: tuple[str, ...] = ()
    """Runs whose samples of split `eval` are held out; absent: the recipe's."""
    max_samples: Positive = 512
    """Most samples (or pairs) that an evaluation takes, chosen by the seed; the same each time."""


class StopRule(Table):
    """A rule of early stopping: once it holds, the training ends, with a checkpoint and `stop.fired`.

    Each `[[stop]]` is one rule, with exactly one of `above`, `below` and `better`."""

    metric: str
    """A metric of steps (a column of the view `metrics`), or of evaluations: `evaluation.loss`,
    `evaluation.reward`, `evaluation.preference_accuracy` and others."""
    above: float | None = None
    """The rule holds when the metric was above this `patience` times in a row."""
    below: float | None = None
    """The rule holds when the metric was below this `patience` times in a row."""
    better: Literal["lower", "higher"] | None = None
    """Which values are better: the rule holds when the last `patience` values were no better than the best
    before them."""
    patience: Positive = 1
    """How many values decide: steps, or evaluations."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """With `better`: by how much a value must be better than the best to count."""

    @model_validator(mode="after")
    def _one_condition(self) -> StopRule:
        given = [key for key in ("above", "below", "better") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a rule has exactly one of above, below and better (got {' and '.join(given) or 'none'})"
            )
        if self.min_delta and self.better is None:
            raise ValueError("min_delta goes with better")
        return self

    @property
    def of_evaluations(self) -> bool:
        """Whether its metric is one of evaluations."""
        return self.metric.startswith(HELD_OUT)

    def said(self) -> Json:
        """The keys that are set, as an event has them."""
        return self.model_dump(mode="json", exclude_defaults=True)


def check_stop_metrics(rules: Collection[StopRule], known: Collection[str], *, evaluates: bool) -> None:
    """Check that rules name metrics that a training has.

    Args:
        known: metrics of steps.
        evaluates: whether there are evaluations.

    Raises:
        ValueError: a rule names another.
    """
    for rule in rules:
        if rule.of_evaluations and not evaluates:
            raise ValueError(
                f"[[stop]] metric {rule.metric!r} is one of evaluations, and there is no [evaluation]"
            )
        if rule.of_evaluations or rule.metric in known:
            continue
        near = difflib.get_close_matches(rule.metric, known, 1)
        raise ValueError(
            f"[[stop]] metric {rule.metric!r} is none of a step: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}")
        )
