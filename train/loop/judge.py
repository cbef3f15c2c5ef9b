"""Judges a training after each rollout batch: evaluates it where that is due, and ends it early by rule."""

from __future__ import annotations

from rollbook.store.events import StopFired
from rollbook.store.fold.history import History, family_of
from rollbook.train.config.config import TrainConfig
from rollbook.train.loop.early_stop import EarlyStop
from rollbook.train.loop.evaluation import Evaluation
from rollbook.train.loop.stopping import Stopping
from rollbook.train.loop.trainer import StepOutcome, Trainer
from rollbook.train.loop.watcher import Watcher


class Judge:
    """Evaluates a training, and says when it is to stop.

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
        """Evaluate the version at hand if that is due and no signal came; then see whether a rule holds."""
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
        """Take a step's metrics, and look."""
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
