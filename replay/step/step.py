"""Replays one optimizer step from the log alone, and compares every stage bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rollbook.replay.claim import judge_claim
from rollbook.replay.claims.training import STAGE as TRAINING
from rollbook.replay.claims.training import training
from rollbook.replay.step.compare import due_of
from rollbook.replay.step.log_numbers import LogNumbers
from rollbook.replay.step.manifest import checked
from rollbook.replay.step.partial import Part, part_stages, recorded_batch
from rollbook.replay.step.run_log import RunLog, recorded_vectors
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store
from rollbook.store.errors import ModelError, OutsideError, ReplayError
from rollbook.store.events import Json, RewardAssigned, StepCommitted
from rollbook.store.fold.history import KINDS, CommittedStep, History, fold_history
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.select.recipe import UNLIMITED, ModelLimits

if TYPE_CHECKING:
    from rollbook.train.resume.promise import Promise


def replay_step(
    log: Store,
    step: int,
    run: str | None = None,
    policy: str = "actor",
    *,
    trust_parts: bool = False,
    one_rank: bool = False,
    part: Part | None = None,
    say: Callable[[Promise], None] = lambda promise: None,
    ran: Callable[[int, int], None] = lambda count, total: None,
) -> StepReplay:
    """Restore the state before a step, run it again, and compare.

    Starts at the nearest checkpoint before the step; steps in between are run and compared too.

    Args:
        trust_parts: import and run the user's parts that the manifest names (`module:name`).
        one_rank: in one process, whatever layout the step was taken in.
        part: only this part of the step.
        say: called, before anything is run, with whether bits are promised here.
        ran: called with how many steps were run again, of how many.

    Raises:
        TrainError: it names parts that are not trusted, or cannot be loaded.
        RankError: the step was taken by several ranks, and one of those that are started here ended.
        ReplayError: no such committed step, several runs have one, or it cannot be replayed from what
            is left.
        ModelError: the model cannot be built.
        CorruptionError: the log is damaged.
    """
    history = history_with(log, step, run, policy)
    target = history.steps[step]
    if target.planned.operations is not None and part is None:
        from rollbook.replay.step.operations import replay_operations

        return replay_operations(log, history, target, say, ran)
    if trust_parts:  # what is promised names them
        for name in named_parts(target.planned.algorithm):
            load_part(name)
    if part is not None and not part.model:
        return _by_the_log(log, history, target, part)
    from rollbook.replay.step.from_checkpoint import replay_from_checkpoint

    replay, passed_over = replay_from_checkpoint(
        RunLog(log, history), target, say, ran, trust_parts=trust_parts, one_rank=one_rank, part=part
    )
    return replace(replay, passed_over=passed_over, late=late_rewards(log, history, target))


def _by_the_log(log: Store, history: History, step: CommittedStep, part: Part) -> StepReplay:
    """A part of a step that needs no model."""
    plan = step.planned
    values = recorded_vectors(log, history, plan).get((plan.step, plan.attempt), {})
    batch = recorded_batch(log, history, plan, values)
    shape = _shape(log, history)
    limits = None if shape is None else ModelLimits(shape.vocab, shape.context)
    run_log = RunLog(log, history)
    selections = run_log.selections
    selections.limits = limits or UNLIMITED
    due = due_of(history, step, run_log.trainings)
    stages = {
        "selection": judge_claim("selection", selections.claim(history.beginning(step))),
        TRAINING: training(history, step, run_log.trainings, excerpt=selections.excerpt),
        **part_stages(step, part, LogNumbers(plan, batch, values), due),
    }
    replay = StepReplay(
        run=history.run,
        step=plan.step,
        attempt=plan.attempt,
        policy=plan.policy,
        policy_version=plan.policy_version,
        from_version=None,
        weights_only=False,
        reran=[],
        stages={stage: stages[stage] for stage in part.shown if stage in stages},
        metrics={},
        late=late_rewards(log, history, step),
    )
    return replay if replay.equal else replace(replay, differs_at_step=plan.step)


def _shape(log: Store, history: History) -> ModelShape | None:
    """The model's architecture, where a checkpoint of it is there."""
    for record in history.checkpoints:
        with contextlib.suppress(ModelError, OutsideError, OSError):
            return read_shape(log.folder(record.path))
    return None


def late_rewards(log: Store, history: History, step: CommittedStep) -> list[Json]:
    """Rewards of a step's trajectories that came after it was planned: they change nothing in its replay."""
    ids = sorted({ref["trajectory_id"] for ref in history.batch_of(step.planned)})
    cut = log.cut(step.planned.cut) if step.planned.cut else {}
    return [
        {
            "trajectory_id": event.record.trajectory_id,
            "turn_id": event.record.turn_id,
            "reward": event.record.reward,
            "source": event.record.source,
        }
        for event in log.events_about(ids)
        if isinstance(event.record, RewardAssigned) and event.seq >= cut.get(event.lane, 0)
    ]


def history_with(log: Store, step: int, run: str | None, policy: str) -> History:
    """The history of the one run that committed the step.

    Raises:
        ReplayError: there is none, or there are several; or the step was abandoned.
    """
    runs = sorted(
        {
            e.run
            for e in log.events_of([StepCommitted.KIND])
            if isinstance(e.record, StepCommitted) and e.record.step == step and run in (None, e.run)
        }
    )
    if not runs:
        where = f"run {run!r}" if run else "this store"
        raise ReplayError(
            f"{where} has no committed step {step}; list them: select run, step, status from steps"
        )
    if len(runs) > 1:
        raise ReplayError(f"runs {', '.join(runs)} each have a step {step}: name one with --run")
    history = fold_history(checked(log.events_of(KINDS)), runs[0], policy)
    if (back := history.abandoned.get(step)) is not None:
        raise ReplayError(
            f"step {step} of run {runs[0]!r} was abandoned: training went back to version {back.back_to}, "
            f"and on from it as version {back.goes_on_as}; version {back.policy_version}, which the step "
            "made, is no part of the run any more"
        )
    if step not in history.steps:
        raise ReplayError(f"run {runs[0]!r} has no committed step {step} of policy {policy!r}")
    return history
