"""Judges a training after each rollout batch: evaluates it when that is due, and stops it early by
rules over the metrics of steps and evaluations.

Whether a rule holds follows from values that are in the log, so a restarted training stops at
the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollbook.store.events import EvalFinished, Json, StepCommitted, StopFired
from rollbook.store.fold.history import History, family_of
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.evaluation import HELD_OUT, OF_AGENTS, StopRule
from rollbook.train.loop.evaluation import Evaluation
from rollbook.train.loop.trainer import StepOutcome, Trainer
from rollbook.train.loop.watcher import Watcher
from rollbook.train.stopping import Stopping


class Judge:
    """Evaluates a training, and decides when it is to stop.

    Args:
        evaluation: None where there is none.
        family: of the training, whose earlier steps and evaluations count.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        history: History,
        family: str,
        evaluation: Evaluation | None,
        watcher: Watcher,
    ) -> None:
        self._config, self._trainer, self._watcher = config, trainer, watcher
        self._evaluation = evaluation
        self._early = EarlyStop(config.stop)
        self._early.past(
            (step.committed for step in history.of_family(family)), history.evaluations_of(family)
        )
        self._fired_at = {stop.policy_version for stop in history.stops if family_of(stop.phase) == family}
        self.stopped = False
        """Whether a rule ended the training."""

    def look(self, stopping: Stopping) -> None:
        """Evaluate the current version if that is due and no signal came; then check whether a rule
        holds."""
        trainer = self._trainer
        if trainer.in_batch:
            return
        if self._evaluation is not None and self._evaluation.due and stopping.number is None:
            record = self._evaluation.run(stopping, self._watcher.warn)
            if record is None:
                self._watcher.note(
                    f"version {trainer.version}: nothing to evaluate it on: no trajectory of split 'eval' "
                    "finished with a reward since"
                )
            else:
                self._early.evaluated(record)
        self._stop_by_rule()

    def stepped(self, outcome: StepOutcome, stopping: Stopping) -> None:
        """Take a step's metrics, then `look`."""
        self._early.stepped(outcome.version, outcome.metrics)
        self.look(stopping)

    def _stop_by_rule(self) -> None:
        fired, trainer = self._early.fired(), self._trainer
        if fired is None or not 0 < trainer.done < self._config.steps:
            return
        self.stopped = True
        if trainer.version not in self._fired_at:
            values = [{"policy_version": version, "value": value} for version, value in fired.values]
            record = StopFired(self._config.policy, trainer.version, trainer.phase, fired.rule.said(), values)
            trainer.write(record)
        where = f"after {trainer.done} of {self._config.steps} steps, at version {trainer.version}"
        self._watcher.note(
            f"stopped early {where}: {fired.said()}. To go on, change or remove this [[stop]] and start again"
        )


Value = tuple[int, float]
"""(policy version, value)"""


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule that holds, and the values that it was decided by."""

    rule: StopRule
    values: list[Value]

    def said(self) -> str:
        """The rule and its values, for a person."""
        metric, newest = self.rule.metric, [f"{value:.4g}" for _, value in self.values[-self.rule.patience :]]
        observed = f"{metric} was {', '.join(newest)}"
        if self.rule.better is None:
            word, bound = (
                ("below", self.rule.below) if self.rule.above is None else ("above", self.rule.above)
            )
            return f"{observed}: {word} {bound:g}"
        version, best = self.values[0]
        return f"{observed}, and never better than {best:.4g} at version {version}"


@dataclass(slots=True)
class EarlyStop:
    """The rules of a training, and the values of the metrics that they name, in order of versions."""

    rules: Sequence[StopRule]
    values: dict[str, list[Value]] = field(default_factory=dict)

    def past(self, committed: Iterable[StepCommitted], evaluations: Iterable[EvalFinished]) -> None:
        """Take what the log already holds."""
        for step in committed:
            self.stepped(step.policy_version, step.metrics)
        for record in evaluations:
            self.evaluated(record)

    def stepped(self, version: int, metrics: Json) -> None:
        """Take a step's metrics."""
        for metric in {rule.metric for rule in self.rules if not rule.of_evaluations}:
            self._add(metric, version, metrics.get(metric))

    def evaluated(self, record: EvalFinished) -> None:
        """Take an evaluation's metrics; those of agents only if it is whole: no rule is to judge by
        a part."""
        partial = OF_AGENTS if record.partial else frozenset()
        wanted = {rule.metric for rule in self.rules if rule.of_evaluations}
        for metric in {name for name in wanted if name.removeprefix(HELD_OUT) not in partial}:
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
