"""Where a replay may start: the checkpoints that lead to the state before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollbook.replay.step.run_log import RunLog
from rollbook.store import Store
from rollbook.store.errors import ModelError, OutsideError, ReplayError, TrainError
from rollbook.store.events import CheckpointWritten, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.batches.manifest_batch import begins
from rollbook.train.checkpoints.checkpoint import Checkpoint, read_checkpoint
from rollbook.train.model.shape import ModelShape, read_shape


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A checkpoint to start at, and the steps that lead from it to the one that is wanted.

    Attributes:
        goes_on: whether the training of the wanted step goes on from it; else it begins there.
        weights_only: it has no optimizer state, and the wanted step is not the first of its training: what
            the step's update makes of its gradients cannot be proven.
        passed_over: why nearer ones were not taken.
    """

    record: CheckpointWritten
    path: Path
    shape: ModelShape
    held: Checkpoint
    between: tuple[CommittedStep, ...]
    goes_on: bool
    weights_only: bool
    passed_over: tuple[str, ...] = ()


def refuse_clients(run: str, plan: StepPlanned) -> None:
    """Refuse a step whose samples are not the log's.

    Raises:
        ReplayError: it is one.
    """
    if plan.operations is not None:
        raise ReplayError(
            f"step {plan.step} of run {run!r} was taken for a client of a service: "
            f"`rollbook replay step {plan.step} --run {run}` replays it, alone and whole"
        )


def find_start(run: RunLog, step: CommittedStep) -> Start:
    """The nearest start from which a step can be replayed with all that the steps on the way need; else
    one at the step itself, with its weights alone.

    Raises:
        ReplayError: there is none; the message says of each checkpoint why not.
    """
    plan, log, history, erased = step.planned, run.log, run.history, run.erased
    refuse_clients(history.run, plan)
    if gone := sorted(_trajectories(history, step) & erased.keys()):
        raise ReplayError(
            f"step {plan.step}: the tokens of trajectory {gone[0]}, which it trained on, were erased "
            f"({erased[gone[0]]}); no step that needs them can be replayed"
        )
    reasons: list[str] = []
    start = _whole_start(log, history, step, erased, reasons) or _start_of_weights(
        log, history, step, reasons
    )
    if start is None:
        there = "; ".join(reasons) or "the log names none"
        raise ReplayError(
            f"step {plan.step} of run {history.run!r} cannot be replayed from any checkpoint: {there}"
        )
    return start


def _whole_start(
    log: Store, history: History, step: CommittedStep, erased: Mapping[str, str], reasons: list[str]
) -> Start | None:
    """The nearest start with all of the state; why nearer checkpoints do not serve is added to the
    reasons."""
    plan = step.planned
    for record in _whole_ones(history, step):
        between, name = history.between(record, plan.step), f"version {record.policy_version}"
        if blocked := [s for s in between if _trajectories(history, s) & erased.keys()]:
            why = f"steps from it lead through step {blocked[-1].planned.step}, of which tokens were erased"
            reasons.append(f"{name}: {why}")
            continue
        if not begins((*between, step)[0].planned):
            reasons.append(f"{name}: it is in the middle of a rollout batch")
            continue
        if (contents := _read(log, record, reasons)) is None:
            continue
        goes_on = record.phase == plan.phase
        if goes_on and contents[2].optimizer is None:
            # Of the step's own version it is a start with weights alone, unless there is an older whole one.
            reasons += [f"{name}: its optimizer's state is not there"] if between else []
            continue
        return Start(
            record, *contents, tuple(between), goes_on=goes_on, weights_only=False, passed_over=tuple(reasons)
        )
    return None


def _start_of_weights(log: Store, history: History, step: CommittedStep, reasons: list[str]) -> Start | None:
    """A start at the step itself with all but the optimizer's state; why others do not serve is added to
    the reasons."""
    plan = step.planned
    of_version = [c for c in reversed(history.checkpoints) if c.policy_version == plan.policy_version]
    for record in of_version if begins(plan) else []:
        if (contents := _read(log, record, reasons)) is None:
            continue
        held, goes_on = contents[2], record.phase == plan.phase
        lacks = ["critic"] if plan.critic is not None and held.critic is None else []
        lacks += ["low-rank factors"] if plan.lora is not None and held.adapter is None else []
        if not lacks:
            return Start(
                record, *contents, (), goes_on=goes_on, weights_only=True, passed_over=tuple(reasons)
            )
        reasons.append(
            f"version {record.policy_version}: has weights alone, and the step needs the {lacks[0]}"
        )
    return None


def has_state(history: History, step: CommittedStep) -> bool:
    """Whether, by the log, a checkpoint has all of the state before a step."""
    return any(c.policy_version == step.planned.policy_version for c in history.starts(step.planned.phase))


def _whole_ones(history: History, step: CommittedStep) -> Sequence[CheckpointWritten]:
    try:
        return history.bases_for(step.planned.step, step.planned.phase)
    except TrainError:
        return []


def _read(
    log: Store, record: CheckpointWritten, reasons: list[str]
) -> tuple[Path, ModelShape, Checkpoint] | None:
    """What a checkpoint holds; None, with a reason, where it is gone or damaged."""
    try:
        path = log.folder(record.path)
        return path, read_shape(path), read_checkpoint(path)
    except (ModelError, OutsideError, OSError) as error:
        reasons.append(f"version {record.policy_version}: {error}")
        return None


def _trajectories(history: History, step: CommittedStep) -> set[str]:
    """The trajectories that a step's rollout batch names."""
    return {ref["trajectory_id"] for ref in history.batch_of(step.planned)}
