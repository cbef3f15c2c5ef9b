"""Replays a step by its model, from the nearest checkpoint before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollbook.replay.claims.backed import STAGE as BACKED
from rollbook.replay.claims.backed import backed
from rollbook.replay.step.partial import Part
from rollbook.replay.step.replayer import Replayer, promised
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import Start, find_start
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store
from rollbook.store.fold.history import CommittedStep
from rollbook.train.resume.promise import Promise


def replay_from_checkpoint(
    run_log: RunLog,
    target: CommittedStep,
    say: Callable[[Promise], None],
    ran: Callable[[int, int], None],
    *,
    trust_parts: bool,
    one_rank: bool,
    part: Part | None,
) -> tuple[StepReplay, tuple[str, ...]]:
    """The replay of a step, and why nearer checkpoints were not started from. Arguments and errors as of
    `replay_step`."""
    step, start = target.planned.step, find_start(run_log, target)
    say(promised(run_log.log, run_log.history.run, target.planned, one_rank=one_rank))
    with Replayer(run_log, start, trust_parts=trust_parts, one_rank=one_rank) as replayer:
        replay = _run_to(replayer, start, target, part, ran)
    if replay.differs_at_step in (None, step) and (part is None or BACKED in part.shown):
        replay = _with_backing(run_log.log, replay, target)
    return replay, start.passed_over


def _run_to(
    replayer: Replayer,
    start: Start,
    target: CommittedStep,
    part: Part | None,
    ran: Callable[[int, int], None],
) -> StepReplay:
    """Run the steps from a start to the one that is wanted, or to the first that differs."""
    step, reran = target.planned.step, list[int]()
    ran(0, len(start.between) + 1)
    for committed in (*start.between, target):
        if committed is target and part is not None and part.passes_alone:
            replay = replayer.run_part(committed, part)
        else:
            replay = replayer.run(committed, claims=committed is target)
        reran.append(committed.planned.step)
        ran(len(reran), len(start.between) + 1)
        if not replay.equal:
            break
    if part is not None and replay.step == step:
        wanted = {stage: replay.stages[stage] for stage in part.shown if stage in replay.stages}
        replay = replace(replay, stages=wanted)
    differs = None if replay.equal else replay.step
    return replace(replay, step=step, reran=reran, differs_at_step=differs)


def _with_backing(log: Store, replay: StepReplay, step: CommittedStep) -> StepReplay:
    """A step's replay, with the stage that says whether its two versions are backed as published and
    served."""
    versions = (step.planned.policy_version, step.committed.policy_version)
    if (stage := backed(log, replay.run, replay.policy, versions)) is None:
        return replay
    result = replace(replay, stages=replay.stages | {BACKED: stage})
    return result if result.equal else replace(result, differs_at_step=result.step)
