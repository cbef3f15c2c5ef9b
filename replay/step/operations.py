"""Replays an optimizer step that a service took for a client: the client's own operations run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from rollbook.replay.step.compare import metrics
from rollbook.replay.verdict import StageReplay, StepReplay, Verdict
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, RunOpened, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.environment import took_flash
from rollbook.train.resume.promise import Promise, promise
from rollbook.train.tenants.base import Base, load_base
from rollbook.train.tenants.bodies import sent_body
from rollbook.train.tenants.effects import Effect, effect_of, start_before, started
from rollbook.train.tenants.history import fold_operations, whole
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import (
    CREATE,
    LOAD,
    OPTIMIZER,
    PASS,
    STEP,
    ModelOperations,
    Operation,
    trained_digest,
)
from rollbook.train.tenants.steps import Passed, metrics_of, passed, stages_of


def replay_operations(
    log: Store,
    history: History,
    step: CommittedStep,
    say: Callable[[Promise], None],
    ran: Callable[[int, int], None],
) -> StepReplay:
    """Put a client's model in the state before a step, run the step's operations again, and compare.

    Starts at the nearest state that was written before them; steps in between are run and compared too.

    Raises:
        ReplayError: the base model is another one now, or the step cannot be replayed from what is left.
        ModelError: the base model cannot be built.
    """
    opened = _opening(log, history.run, step.planned)
    base = _base(opened)
    here = promise(opened.environment, base.environment())
    say(here)
    model = next(m for m in fold_operations(log).operations.models.values() if m.run == history.run)
    assert step.planned.operations is not None
    number = int(step.planned.operations[-1]["number"])
    again = _Again(log, base, model, here)
    replay = again.until(number, history, ran)
    return replace(replay, step=step.planned.step)


def _opening(log: Store, run: str, plan: StepPlanned) -> RunOpened:
    """The run's last opening before a step was planned."""
    opening: RunOpened | None = None
    for event in log.events_of([RunOpened.KIND, StepPlanned.KIND]):
        record = event.record
        if event.run == run and isinstance(record, RunOpened):
            opening = record
        elif event.run == run and isinstance(record, StepPlanned) and record.step == plan.step:
            break
    if opening is None:
        raise ReplayError(f"run {run!r} was never opened: its log is not whole")
    return opening


def _base(opened: RunOpened) -> Base:
    config, folder = opened.config, Path(opened.config["base"])
    how = {key: config[key] for key in ("device", "dtype", "threads", "recompute")}
    base = load_base(config["base_model"], folder, **how, flash=took_flash(opened.environment))
    if base.digest != config["weights_digest"]:
        was = config["weights_digest"]
        raise ReplayError(
            f"{folder}: its weights are {base.digest[:16]}, and were {was[:16]} when the step was taken; put "
            "the model back there"
        )
    return base


class _Again:
    """Operations of a model, run again in order."""

    def __init__(self, log: Store, base: Base, model: ModelOperations, here: Promise) -> None:
        self._log, self._base, self._model, self._here = log, base, model, here

    def until(self, number: int, history: History, ran: Callable[[int, int], None]) -> StepReplay:
        """Run operations again up to a step, or to the first that differs."""
        first = self._behind_step(number)
        start, since = start_before(self._model, first)
        to_run = [*since, *(self._model.operations[n] for n in range(first, number + 1))]
        steps = [operation for operation in to_run if _is_done(operation, STEP)]
        model, reran = started(self._base, self._log.path, self._model, start), list[int]()
        # Passes of the first step that the state holds already: its digest says that they are as recorded.
        before = () if start is None else self._passes_before(start.accepted.number + 1)
        passes = [*map(passed, before)]
        from_version = _step_of(history, steps[0]).planned.policy_version
        ran(0, len(steps))
        for operation in to_run:
            if _is_done(operation, PASS):
                passes.append(self._pass(model, operation))
            elif _is_done(operation, LOAD):
                effect_of(model, operation.accepted, self._log.path)
                passes = []
            elif _is_done(operation, STEP):
                step = _step_of(history, operation)
                replay = self._step(model, step, operation, passes, from_version)
                passes = []
                reran.append(step.planned.step)
                ran(len(reran), len(steps))
                if not replay.equal:
                    break
        differs = None if replay.equal else replay.step
        return replace(replay, run=history.run, reran=reran, differs_at_step=differs)

    def _behind_step(self, number: int) -> int:
        """The number of the first operation behind the last step, or the last load, before one."""
        for before in reversed(range(CREATE + 1, number)):
            if _is_done(self._model.operations[before], STEP, LOAD):
                return before + 1
        return CREATE + 1

    def _passes_before(self, number: int) -> list[Operation]:
        """The backward passes whose gradients a model has before an operation."""
        before = (self._model.operations[n] for n in range(self._behind_step(number), number))
        return [operation for operation in before if _is_done(operation, PASS)]

    def _pass(self, model: ClientModel, operation: Operation) -> Passed:
        accepted = whole(self._log, operation)
        effect = effect_of(model, accepted, self._log.path)
        digest = sha256(sent_body("protobuf", accepted.body)).hexdigest()
        return Passed(replace(operation.accepted, body_digest=digest), effect.digests, effect.metrics)

    def _step(
        self,
        model: ClientModel,
        step: CommittedStep,
        operation: Operation,
        passes: Sequence[Passed],
        from_version: int,
    ) -> StepReplay:
        before = model.digests(model.trained, OPTIMIZER)
        effect = effect_of(model, operation.accepted, self._log.path)
        plan = step.planned
        computed = metrics_of(plan, passes, effect.metrics)
        return StepReplay(
            run="",
            step=plan.step,
            attempt=plan.attempt,
            policy=plan.policy,
            policy_version=plan.policy_version,
            from_version=from_version,
            weights_only=False,
            reran=[],
            stages=self._stages(step, before, passes, effect) | {"metrics": metrics(step, computed)},
            metrics=computed,
            environment=self._here.told,
            promised=self._here.bits,
        )

    def _stages(
        self, step: CommittedStep, before: Json, passes: Sequence[Passed], effect: Effect
    ) -> dict[str, StageReplay]:
        recorded = step.planned.input_digests | step.committed.digests
        replayed = {"input_weights": trained_digest(before), "input_optimizer": before[OPTIMIZER]}
        replayed |= stages_of(passes, effect.digests)
        return {
            stage: StageReplay(
                stage,
                Verdict.equal if recorded.get(stage) == digest else Verdict.differs,
                recorded.get(stage),
                digest,
            )
            for stage, digest in replayed.items()
        }


def _is_done(operation: Operation, *kinds: str) -> bool:
    return operation.succeeded and operation.accepted.operation in kinds


def _step_of(history: History, operation: Operation) -> CommittedStep:
    """The step that an operation is."""
    number = operation.accepted.number
    return next(
        step
        for step in history.steps.values()
        if step.planned.operations and step.planned.operations[-1]["number"] == number
    )
