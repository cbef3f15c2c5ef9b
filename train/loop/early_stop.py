"""Early stopping: rules over metrics of steps and of evaluations. Pure.

Whether a rule holds follows from values that are in the log, so a restarted training stops where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollbook.store.events import EvalFinished, Json, StepCommitted
from rollbook.train.config.evaluation import HELD_OUT, OF_AGENTS, StopRule

Value = tuple[int, float]
"""(policy version, value)"""


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule that holds, and the values that it judged by."""

    rule: StopRule
    values: list[Value]

    def said(self) -> str:
        """The rule and its values, for a person."""
        metric, newest = self.rule.metric, [f"{value:.4g}" for _, value in self.values[-self.rule.patience :]]
        seen = f"{metric} was {', '.join(newest)}"
        if self.rule.better is None:
            word, bound = (
                ("below", self.rule.below) if self.rule.above is None else ("above", self.rule.above)
            )
            return f"{seen}: {word} {bound:g}"
        version, best = self.values[0]
        return f"{seen}, and never better than {best:.4g} at version {version}"


@dataclass(slots=True)
class EarlyStop:
    """The rules of a training, and the values of the metrics that they name, in order of versions."""

    rules: Sequence[StopRule]
    values: dict[str, list[Value]] = field(default_factory=dict)

    def past(self, committed: Iterable[StepCommitted], evaluations: Iterable[EvalFinished]) -> None:
        """Take what the log has already."""
        for step in committed:
            self.stepped(step.policy_version, step.metrics)
        for record in evaluations:
            self.evaluated(record)

    def stepped(self, version: int, metrics: Json) -> None:
        """Take a step's metrics."""
        for metric in {rule.metric for rule in self.rules if not rule.of_evaluations}:
            self._add(metric, version, metrics.get(metric))

    def evaluated(self, record: EvalFinished) -> None:
        """Take an evaluation's; what is of agents only if it is whole: no rule is to judge by a part."""
        partial = OF_AGENTS if record.partial else frozenset()
        wanted = {rule.metric for rule in self.rules if rule.of_evaluations}
        for metric in {one for one in wanted if one.removeprefix(HELD_OUT) not in partial}:
            self._add(metric, record.policy_version, record.metrics.get(metric.removeprefix(HELD_OUT)))

    def _add(self, metric: str, version: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.values.setdefault(metric, []).append((version, float(value)))

    def fired(self) -> Fired | None:
        """The first rule that holds, or None."""
        for rule in self.rules:
            judged = judged_by(rule, self.values.get(rule.metric, []))
            if judged is not None:
                return Fired(rule, judged)
        return None


def judged_by(rule: StopRule, values: Sequence[Value]) -> list[Value] | None:
    """The values for which a rule holds; None where it does not hold.

    `patience` and `min_delta` are those of Keras's EarlyStopping.

    Returns:
        With `better`, the best value and those after it; else the last `patience`.
    """
    if rule.better is None:
        last = values[-rule.patience :]
        bound, beyond = (rule.above, 1) if rule.above is not None else (rule.below, -1)
        assert bound is not None
        held = len(last) == rule.patience and all(beyond * value > beyond * bound for _, value in last)
        return list(last) if held else None
    sign, best = (-1 if rule.better == "lower" else 1), 0
    for at, (_, value) in enumerate(values):
        if sign * (value - values[best][1]) > rule.min_delta:
            best = at
    return list(values[best:]) if len(values) - 1 - best >= rule.patience else None
