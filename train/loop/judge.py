"""Judges a training after each rollout batch: evaluates it when that is due, and stops it early by
rules over the metrics of steps and evaluations.

Whether a rule holds follows from values that are in the log, so a restarted training stops at
the same place.

Evaluates the versions of a training on held-out data, or waits for agents to be evaluated at the
trainer's version.

It does not affect the training. Whoever runs the agents learns of an evaluation from the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rollbook.store import Store, format_cut
from rollbook.store.cut import parse_cut
from rollbook.store.events import EvalFinished, EvalSampled, EvalStarted, Json, StepCommitted, StopFired
from rollbook.store.fold.history import CAME_TO_AN_END, EVALUATION_KINDS, EvaluatedAgents, History, family_of
from rollbook.store.log.tail import Filter
from rollbook.store.patience import Patience, waits
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import MicroBatch, build_batch
from rollbook.train.batches.experience import Scores, experience_of, trained_masks
from rollbook.train.config.config import HELD_OUT, OF_AGENTS, StopRule, TrainConfig
from rollbook.train.loop.trainer import StepOutcome, Trainer
from rollbook.train.loop.watcher import Watcher
from rollbook.train.select.samples import Sample
from rollbook.train.sources.held_out import HeldOutReward, HeldOutSamples, held_out_rewards
from rollbook.train.step.experiences import score
from rollbook.train.step.predictions import Predictions, score_loss
from rollbook.train.step.step import loss_inputs
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
            record = StopFired(self._config.policy, trainer.version, trainer.phase, fired.rule.dump(), values)
            trainer.write(record)
        where = f"after {trainer.done} of {self._config.steps} steps, at version {trainer.version}"
        self._watcher.note(
            f"stopped early {where}: {fired.text()}. To go on, change or remove this [[stop]] and start again"
        )


Value = tuple[int, float]
"""(policy version, value)"""


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule that holds, and the values that it was decided by."""

    rule: StopRule
    values: list[Value]

    def text(self) -> str:
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


class Evaluation:
    """Evaluates versions of a training that has `[evaluation]`.

    Args:
        samples: that are held out; None where the loss is not evaluated.
        cut: that they are of, as text.
        family: of the training, whose earlier evaluations it continues.
    """

    def __init__(
        self,
        config: TrainConfig,
        log: Store,
        trainer: Trainer,
        history: History,
        family: str,
        samples: HeldOutSamples | None,
        cut: str,
    ) -> None:
        self._config, self._log, self._trainer, self._history = config, log, trainer, history
        self._samples, self._cut = samples, cut
        earlier, steps = history.evaluations_of(family), history.of_family(family)
        self._versions = {record.policy_version for record in earlier}
        self._first = steps[0].planned.policy_version if steps else trainer.version
        self._counted = set(self._rewards(earlier[-1].counted_to)) if earlier else set[str]()
        self._references: list[Singles | None] | None = None
        """The reference's logprobs of each micro-batch, which are always the same."""

    @property
    def due(self) -> bool:
        """Whether the trainer's version is to be evaluated now."""
        trainer, config = self._trainer, self._config
        assert config.evaluation is not None
        if trainer.in_batch or trainer.version in self._versions:
            return False
        every, done = config.evaluation.every, trainer.done
        passed = done // every > (done - config.algorithm.demand.steps) // every
        return passed or done == 0 or done >= config.steps

    def run(self, stopping: Stopping, say: Callable[[str], None]) -> EvalFinished | None:
        """Evaluate the trainer's version, and record it; None where there was nothing to evaluate
        it on.

        Args:
            say: called with a message if agents were awaited in vain.

        Raises:
            Stopped: a signal came while they were awaited.
        """
        config = self._config
        if self._samples is None:
            scored: Json = {}
            tokens = 0
        else:
            with self._trainer.with_devices():
                scored, tokens = self._scored(self._samples)
        awaited = None
        if config.evaluation is not None and config.evaluation.wait_s and not config.algorithm.head_width:
            awaited = await_agents(config, self._log, self._trainer, stopping, say)
        to = self._log.head()
        all_of = self._rewards(format_cut(to))
        fresh = [reward for name, reward in all_of.items() if name not in self._counted]
        self._counted, metrics = set(all_of), scored | _means(fresh)
        self._versions.add(self._trainer.version)
        if not metrics:
            return None
        record = EvalFinished(
            policy=config.policy,
            policy_version=self._trainer.version,
            phase=self._trainer.phase,
            cut=self._cut,
            counted_to=format_cut(to),
            samples=0 if self._samples is None else len(self._samples),
            tokens=tokens,
            trajectories=len(fresh),
            oldest_version=min((r.oldest_version for r in fresh), default=None),
            newest_version=max((r.newest_version for r in fresh), default=None),
            metrics=metrics,
            expected=None if awaited is None else awaited.expected,
            whole=None if awaited is None else awaited.whole,
        )
        self._trainer.write(record)
        return record

    def _rewards(self, cut: str) -> dict[str, HeldOutReward]:
        if self._config.algorithm.head_width:
            return {}  # no trajectory is sampled by a reward model
        config = self._config
        args = (config.run, config.policy, config.recipe.reward_source, self._first)
        return held_out_rewards(self._log, parse_cut(cut), *args)

    def _scored(self, held_out: HeldOutSamples) -> tuple[Json, int]:
        """The loss and the algorithm's measures of the held-out samples; and the number of tokens
        behind them."""
        algorithm = self._config.algorithm
        read, losses, tokens, count = _LossOfHeldOut(algorithm), list[_HeldOutLoss](), 0, 0
        references = [] if self._references is None else self._references
        for at, samples in enumerate(held_out.micro_batches()):
            if self._references is None:
                references.append(self._reference(samples))
            scores = Scores(reference_logprobs=references[at])
            batch = build_batch(
                experience_of(samples, algorithm, scores), _whole(samples), packed=self._config.packed
            )
            losses += self._trainer.policy.forward(batch.micro_batches, read)
            tokens, count = tokens + batch.trained_tokens, count + batch.trained_samples
        self._references = references
        sums = torch.stack([part.total for part in losses])
        loss = float(sums.double().sum()) / max(algorithm.divisor(Totals(tokens, count)), 1)
        values = {
            name: torch.cat([part.measured[name] for part in losses]).double().numpy()
            for name in losses[0].measured
        }
        means = {name: float(of_each.mean()) for name, of_each in values.items()}
        return _finite({"loss": loss} | means | algorithm.fitted(values)), tokens

    def _reference(self, samples: list[Sample]) -> Singles | None:
        """The reference's logprobs of a micro-batch, where the algorithm asks for them."""
        if self._config.algorithm.reference is None:
            return None
        masks, references = trained_masks(samples), self._trainer.references
        policy, algorithm = self._trainer.policy, self._config.algorithm
        pending = score(
            policy, algorithm, samples, masks, _whole(samples), references, packed=self._config.packed
        )
        return pending().reference_logprobs


@dataclass(frozen=True, slots=True)
class _HeldOutLoss:
    """A micro-batch's share of the loss, and the algorithm's measures of its samples or pairs."""

    total: torch.Tensor
    measured: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _LossOfHeldOut:
    """Reads the loss of a micro-batch of held-out samples. It is sent to other ranks."""

    algorithm: Algorithm

    def __call__(self, outputs: torch.Tensor, micro: MicroBatch) -> _HeldOutLoss:
        mask = torch.from_numpy(micro.loss_mask[:, 1:]).to(outputs.device)
        if self.algorithm.head_width:
            loss, _, measured = score_loss(outputs, micro, self.algorithm)
        else:
            loss, measured = _losses(outputs, micro, self.algorithm)
        total = self.algorithm.add(loss, mask)
        return _HeldOutLoss(total.cpu(), {name: values.cpu() for name, values in measured.items()})


def _losses(
    logits: torch.Tensor, micro: MicroBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(masked losses [B, T - 1], what the algorithm measures) of a policy's logits."""
    inputs = loss_inputs(Predictions(logits, micro).logprobs(), micro, None)
    return torch.where(inputs.mask, algorithm.loss(inputs), 0.0), algorithm.measures(inputs)


def _whole(samples: list[Sample]) -> list[list[list[int]]]:
    """A partition of one rank with one micro-batch of all samples."""
    return [[list(range(len(samples)))]]


def _means(rewards: list[HeldOutReward]) -> Json:
    """Mean reward of trajectories, and the share of successes among those that record one."""
    outcomes = [r.success for r in rewards if r.success is not None]
    metrics = {"reward": math.fsum(r.reward for r in rewards) / len(rewards)} if rewards else {}
    return _finite(metrics | ({"success": sum(outcomes) / len(outcomes)} if outcomes else {}))


def _finite(values: dict[str, float]) -> Json:
    """The values, with null for those that are not finite, which JSON cannot express."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Awaited:
    """The outcome of waiting for agents.

    Attributes:
        expected: trajectories that there were to be; None: nobody said.
        whole: whether all of them came to an end, or who ran them says so and launched none by
            itself.
    """

    expected: int | None
    whole: bool


def await_agents(
    config: TrainConfig, log: Store, trainer: Trainer, stopping: Stopping, say: Callable[[str], None]
) -> Awaited:
    """Return once the log says that agents were evaluated, or once `evaluation.wait_s` passed,
    which is reported.

    What is waited for is reported after 10 s, and each minute.

    Raises:
        Stopped: a signal came.
        EngineError: no engine can be given the version.
    """
    assert config.evaluation is not None
    version, wait_s, agents = trainer.version, config.evaluation.wait_s, EvaluatedAgents()
    with log.tail(log.head(), Filter(EVALUATION_KINDS | {EvalSampled.KIND}, run=config.run)) as tail:
        trainer.have_served()
        trainer.write(EvalStarted(config.policy, version, trainer.phase))
        began = time.monotonic()
        deadline, keep_served = began + wait_s, stopping.in_hand(trainer.keep_served)
        patience = Patience(began)
        with stopping.waiting():
            while (left := deadline - time.monotonic()) > 0:
                for event in tail.poll():
                    record = event.record
                    agents.take(record)
                    if isinstance(record, EvalSampled) and (record.policy, record.policy_version) == (
                        config.policy,
                        version,
                    ):
                        return _sampled(log, config.run, record)
                keep_served()
                if patience.due(time.monotonic()):
                    what = f"agents to be evaluated at version {version}: {agents.in_words}"
                    say(waits(what, time.monotonic() - began, left, time.time()))
                tail.wait(min(left, POLL_S))
    ended, expected = _ended(log, config.run, agents.rollout)
    say(
        f"version {version}: agents were not evaluated within {wait_s:g} s (evaluation.wait_s), "
        f"{agents.in_words}: those that finish later count to the next evaluation. Does "
        "`rollbook rollout --follow` run, with [evaluation]?"
    )
    return Awaited(expected, expected is not None and ended >= expected)


def _sampled(log: Store, run: str, record: EvalSampled) -> Awaited:
    """The outcome for agents that a record says were evaluated, as far as the log has it."""
    ended, known = _ended(log, run, record.rollout)
    return Awaited(record.trajectories, known is None or ended >= record.trajectories)


def _ended(log: Store, run: str, rollout: str | None) -> tuple[int, int | None]:
    """(places of rollouts whose agent came to an end, places in all; None: no launch says it)."""
    params = {"run": run, "rollout": rollout, "ends": list(CAME_TO_AN_END)}
    with connect_at(log, format_cut(log.head())) as connection:
        [(ended, places)] = connection.read(_PLACES, params).fetchall()
    return ended, places


_PLACES = """
    SELECT count(DISTINCT (epoch, task, sample)) FILTER (list_contains($ends, status)), max(places)
    FROM launches WHERE run = $run AND rollout = $rollout"""
