"""What the replay of one step needs of a store: events, trajectories and checkpoints, found by the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store, parse_cut
from rollbook.store.errors import ReplayError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    PolicyActivated,
    PolicyPublished,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    StepRetired,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.fold.history import KINDS, CommittedStep, History, all_samples, fold_history
from rollbook.store.inside import place_inside
from rollbook.store.interchange.excerpt import Rows
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.lora import recorded_lora
from rollbook.train.loop.experiences import begins

_OfVersion = PolicyPublished | PolicyActivated | SyncStarted | SyncFinished | SyncFailed
_OF_VERSION = frozenset(record.KIND for record in _OfVersion.__args__)


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step's replay needs.

    Attributes:
        steps: those that are run again, in order; the step itself is the last one.
        base: the checkpoint that they start from.
        checkpoints: `base`, and those of versions that the steps name.
        events: of the training, each with its place: `run.opened`, those of the steps and of the checkpoints.
        trajectories: ids of those that the steps trained on, compared with, or dropped.
    """

    run: str
    policy: str
    steps: tuple[CommittedStep, ...]
    base: CheckpointWritten
    checkpoints: tuple[CheckpointWritten, ...]
    events: tuple[Event, ...]
    trajectories: frozenset[str]

    @property
    def step(self) -> CommittedStep:
        """The step itself."""
        return self.steps[-1]

    @property
    def goes_on(self) -> bool:
        """Whether the optimizer goes on from the checkpoint's state; else it begins anew."""
        return self.base.phase == self.step.planned.phase

    def lanes(self, rows: Iterable[Rows]) -> set[str]:
        """The lanes of which there are rows, or which a step's cut names."""
        lanes = {lane for of in rows for lane in of}
        return lanes | {lane for step in self.steps for lane in parse_cut(step.planned.cut)}


@dataclass(frozen=True, slots=True)
class StepStart:
    """Where the replay of a step starts, and the steps from there; the step itself is the last one."""

    history: History
    base: CheckpointWritten
    steps: tuple[CommittedStep, ...]


def training_events(log: Store) -> list[Event]:
    """What the log says of trainings, and how their runs were started.

    Raises:
        CorruptionError: the log is damaged.
    """
    return list(log.events_of(KINDS | {RunOpened.KIND}))


def start_of_step(log: Store, events: Sequence[Event], step: int, run: str | None, policy: str) -> StepStart:
    """Where a step's replay starts: the nearest checkpoint whose folder is there.

    Args:
        events: as of `training_events`.

    Raises:
        ReplayError: no such committed step, several runs have one, or no checkpoint is there.
    """
    history = _history(events, step, run, policy)
    target, gone = history.steps[step], []
    for base in history.bases_for(step, target.planned.phase):
        steps = (*history.between(base, step), target)
        if not begins(steps[0].planned):
            continue
        if _is_there(log, base):
            return StepStart(history, base, steps)
        gone.append(base.path)
    raise ReplayError(
        f"step {step} of run {history.run!r}: no checkpoint that it could be replayed from is there (looked "
        f"for {', '.join(gone) or 'one at the beginning of its rollout batch'}): restore one from a copy"
    )


def contents_of_step(log: Store, step: int, run: str | None, policy: str) -> StepContents:
    """What the replay of a step needs.

    Raises:
        ReplayError: as `start_of_step`, or a checkpoint that its manifest names is not there.
        TrainError: it names a part of one's own that was not loaded.
        CorruptionError: the log is damaged.
    """
    seen = training_events(log)
    start = start_of_step(log, seen, step, run, policy)
    checkpoints = {start.base.policy_version: start.base}
    for version in _versions_named(start.steps):
        checkpoints.setdefault(version, _checkpoint(log, start.history, version))
    events, dropped = _of_training(seen, start, list(checkpoints.values()))
    plans = [one.planned for one in start.steps]
    refs = (ref for plan in plans for ref in (all_samples(plan) if begins(plan) else plan.samples))
    ids = {ref["trajectory_id"] for ref in refs}
    ids |= {other["trajectory_id"] for plan in plans for other in plan.others or ()}
    return StepContents(
        run=start.history.run,
        policy=policy,
        steps=start.steps,
        base=start.base,
        checkpoints=tuple(checkpoints.values()),
        events=tuple(events),
        trajectories=frozenset(ids | dropped),
    )


def events_of_versions(log: Store, contents: StepContents, rows: Rows) -> list[Event]:
    """How the versions of the steps, and those that sampled these rows, came to engines."""
    made = {
        version for s in contents.steps for version in (s.planned.policy_version, s.committed.policy_version)
    }
    versions = made | {c.policy_version for c in contents.checkpoints} | _sampled_by(rows, contents.policy)
    return [
        event
        for event in log.events_of(_OF_VERSION)
        if isinstance(event.record, _OfVersion)
        and (event.run, event.record.policy) == (contents.run, contents.policy)
        and event.record.policy_version in versions
    ]


def _history(events: Sequence[Event], step: int, run: str | None, policy: str) -> History:
    """The history of the one run that committed the step."""
    runs = sorted(
        {
            e.run
            for e in events
            if isinstance(e.record, StepCommitted)
            and (e.record.step, e.record.policy) == (step, policy)
            and run in (None, e.run)
        }
    )
    if not runs:
        where = f"run {run!r}" if run else "this store"
        raise ReplayError(
            f"{where} has no committed step {step} of policy {policy!r}; list them: select run, policy, "
            "step, status from steps"
        )
    if len(runs) > 1:
        raise ReplayError(f"runs {', '.join(runs)} each have a step {step}: name one with --run")
    history = fold_history(events, runs[0], policy)
    if step in history.abandoned:
        raise ReplayError(
            f"step {step} of run {runs[0]!r} was abandoned: training went back to version "
            f"{history.abandoned[step].back_to}, and the step is no part of the run any more"
        )
    if step not in history.steps:
        raise ReplayError(f"step {step} of run {runs[0]!r}: the log no longer holds its plan")
    return history


def _checkpoint(log: Store, history: History, version: int) -> CheckpointWritten:
    """The checkpoint of a version that a step names, which a replay reads."""
    found = [c for c in history.checkpoints if c.policy_version == version]
    if not found or not _is_there(log, found[-1]):
        raise ReplayError(
            f"run {history.run!r} has no checkpoint of version {version} of policy {history.policy!r}, which "
            "the step's manifest names: restore it from a copy"
        )
    return found[-1]


def _is_there(log: Store, checkpoint: CheckpointWritten) -> bool:
    return place_inside(log.path, checkpoint.path).is_dir()


def _versions_named(steps: Iterable[CommittedStep]) -> set[int]:
    """Versions whose weights steps need besides: of references, and those that factors are beside."""
    plans = [step.planned for step in steps]
    named = {recorded_algorithm(plan.algorithm).reference for plan in plans}
    named |= {recorded_lora(plan.lora).base_version for plan in plans if plan.lora is not None}
    return {version for version in named if version is not None}


def _of_training(
    events: Iterable[Event], start: StepStart, checkpoints: list[CheckpointWritten]
) -> tuple[list[Event], set[str]]:
    """The events of these steps and checkpoints, and the trajectories that their plans dropped."""
    history = start.history
    attempts = {step.planned.step: step.planned.attempt for step in start.steps}
    kept: list[Event] = []
    drops: list[Event] = []  # of the plan that follows: both were appended together
    dropped: set[str] = set()
    for event in events:
        match event.record:
            case SampleDropped():
                drops.append(event)
                continue
            case StepPlanned() as plan:
                mine = _is_of(event, plan, history) and attempts.get(plan.step) == plan.attempt
                kept += [*drops, event] if mine else []
                dropped |= {d.record.trajectory_id for d in drops} if mine else set()  # type: ignore[union-attr]
                drops = []
            case StepCommitted() as done if _is_of(event, done, history):
                kept += [event] if attempts.get(done.step) == done.attempt else []
            case StepRetired() as retired if _is_of(event, retired, history):
                kept += [event] if retired.step in attempts else []
            case CheckpointWritten() as written if _is_of(event, written, history):
                kept += [event] if written in checkpoints else []
            case RunOpened() if event.run == history.run:
                kept.append(event)
    return kept, dropped


def _is_of(
    event: Event, record: StepPlanned | StepCommitted | StepRetired | CheckpointWritten, history: History
) -> bool:
    return (event.run, record.policy) == (history.run, history.policy)


def _sampled_by(rows: Rows, policy: str) -> set[int]:
    """The versions of the policy that sampled tokens in these rows."""
    found: set[int] = set()
    for table in rows.values():
        spans = pc.list_flatten(table["version_spans"])
        if isinstance(spans, pa.ChunkedArray):
            spans = spans.combine_chunks()
        mine = spans.filter(pc.equal(pc.struct_field(spans, "policy"), policy))
        found.update(pc.struct_field(mine, "version").unique().to_pylist())
    return found
