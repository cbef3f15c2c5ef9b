"""What the replay of one step needs of a store: events, trajectories and checkpoints, found by the log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start
from rollbook.replay.step.step import history_with
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
    StepFailed,
    StepPlanned,
    StepRetired,
    StepVectors,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.fold.history import KINDS, CommittedStep, History, all_samples
from rollbook.store.interchange.excerpt import Rows
from rollbook.store.safe_paths import place_inside
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.manifest_batch import begins
from rollbook.train.config.lora import recorded_lora

CONFIG = "config.json"
"""A model's architecture, in a checkpoint's folder."""
_OfVersion = PolicyPublished | PolicyActivated | SyncStarted | SyncFinished | SyncFailed
_OfStep = StepPlanned | StepCommitted | StepVectors | StepRetired
_OF_VERSION = frozenset(record.KIND for record in _OfVersion.__args__)


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step's replay needs.

    Attributes:
        steps: the steps to run again, in order; the step itself is the last one.
        base: the checkpoint that they start from; None where no model is run.
        checkpoints: `base`, and those of the versions that the steps name; where no model is run, the
            one whose `CONFIG` says what a model takes.
        events: the training's, each with its place: `run.opened`, those of the steps and checkpoints,
            and the earlier steps that are only looked up.
        trajectories: ids of those that the steps trained on, compared with, or dropped.
    """

    history: History
    steps: tuple[CommittedStep, ...]
    base: CheckpointWritten | None
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
        return self.base is not None and self.base.phase == self.step.planned.phase

    def lanes(self, rows: Iterable[Rows]) -> set[str]:
        """The lanes that have rows here, or that the cut of a plan or of a drop names."""
        records = (event.record for event in self.events)
        cuts = {of.cut for of in records if isinstance(of, StepPlanned | SampleDropped) and of.cut}
        return {lane for of in rows for lane in of} | {lane for cut in cuts for lane in parse_cut(cut)}


def contents_of_step(
    log: Store, step: int, run: str | None, policy: str, *, weights: bool = True, trust_parts: bool = False
) -> StepContents:
    """What the replay of a step needs.

    Args:
        weights: whether it runs a model; else it goes as far as the log alone does.
        trust_parts: import the user's parts that a manifest names: they say what it needs.

    Raises:
        ReplayError: no such step, no start for it, or a checkpoint that its manifest names is not
            there.
        TrainError: it names a user's part that is not trusted, or cannot be loaded.
        CorruptionError: the log is damaged.
    """
    history = history_with(log, step, run, policy)
    steps: tuple[CommittedStep, ...] = (history.steps[step],)
    base = None
    if weights:
        start = find_start(RunLog(log, history), steps[0])
        steps, base = (*start.between, *steps), start.record
    if trust_parts:
        for name in sorted(
            {name for committed in steps for name in named_parts(committed.planned.algorithm)}
        ):
            load_part(name)
    if base is None:
        checkpoints = _with_config(log, history)
    else:
        named = _versions_named(steps) - {base.policy_version}
        checkpoints = [base, *(_checkpoint(log, history, version) for version in sorted(named))]
    plans = [committed.planned for committed in steps]
    refs = (ref for plan in plans for ref in (all_samples(plan) if begins(plan) else plan.samples))
    ids = {ref["trajectory_id"] for ref in refs}
    ids |= {other["trajectory_id"] for plan in plans for other in plan.others or ()}
    events, dropped = _training_events(log, history, steps, checkpoints)
    ids |= dropped
    events += _earlier_events(log, history, steps, ids)
    return StepContents(history, steps, base, tuple(checkpoints), tuple(events), frozenset(ids))


def events_of_versions(log: Store, contents: StepContents, rows: Rows) -> list[Event]:
    """The publications, syncs and activations of the versions of the steps and checkpoints, and of those
    that sampled these rows."""
    step_versions = {
        version for s in contents.steps for version in (s.planned.policy_version, s.committed.policy_version)
    }
    versions = (
        step_versions
        | {c.policy_version for c in contents.checkpoints}
        | _sampled_by(rows, contents.history.policy)
    )
    which = contents.history.run, contents.history.policy
    return [
        event
        for event in log.events_of(_OF_VERSION)
        if isinstance(event.record, _OfVersion)
        and (event.run, event.record.policy) == which
        and event.record.policy_version in versions
    ]


def _checkpoint(log: Store, history: History, version: int) -> CheckpointWritten:
    """The checkpoint of a version that a step names, which a replay reads."""
    matches = [c for c in history.checkpoints if c.policy_version == version]
    if not matches or not place_inside(log.path, matches[-1].path).is_dir():
        raise ReplayError(
            f"run {history.run!r} has no checkpoint of version {version} of policy {history.policy!r}, which "
            "the step's manifest names: restore it from a copy"
        )
    return matches[-1]


def _with_config(log: Store, history: History) -> list[CheckpointWritten]:
    """The newest checkpoint that tells the model's architecture, if there is one."""
    candidates = (
        c for c in reversed(history.checkpoints) if (place_inside(log.path, c.path) / CONFIG).is_file()
    )
    return [c for c in (next(candidates, None),) if c is not None]


def _versions_named(steps: Iterable[CommittedStep]) -> set[int]:
    """The other versions whose weights the steps need: of references, and the base of LoRA factors."""
    plans = [step.planned for step in steps]
    named = {recorded_algorithm(plan.algorithm).reference for plan in plans}
    named |= {recorded_lora(plan.lora).base_version for plan in plans if plan.lora is not None}
    return {version for version in named if version is not None}


def _training_events(
    log: Store, history: History, steps: Sequence[CommittedStep], checkpoints: Collection[CheckpointWritten]
) -> tuple[list[Event], set[str]]:
    """The events of these steps and checkpoints, and the trajectories that their plans dropped."""
    attempts = {step.planned.step: step.planned.attempt for step in steps}
    kept: list[Event] = []
    drops: list[Event] = []  # of the plan that follows: both were appended together
    dropped: set[str] = set()
    for event in log.events_of(KINDS | {RunOpened.KIND, StepVectors.KIND}):
        if isinstance(event.record, SampleDropped):
            drops.append(event)
        elif isinstance(event.record, StepPlanned):
            if _is_of(event, history, attempts):
                kept += [*drops, event]
                dropped |= {d.record.trajectory_id for d in drops if isinstance(d.record, SampleDropped)}
            drops = []
        elif isinstance(event.record, CheckpointWritten):
            kept += [event] if event.run == history.run and event.record in checkpoints else []
        elif isinstance(event.record, RunOpened):
            kept += [event] if event.run == history.run else []
        elif _is_of(event, history, attempts):
            kept.append(event)
    return kept, dropped


def _earlier_events(
    log: Store, history: History, steps: Sequence[CommittedStep], ids: Collection[str]
) -> list[Event]:
    """The plans and results of earlier steps that the replay looks up: the step that made the version that
    the first one starts from; steps that used samples of these trajectories, which are not used again;
    and earlier attempts at the step itself, whose samples it may have dropped."""
    first, last = steps[0].planned, steps[-1].planned
    attempts: dict[int, int] = {}
    for number, step in history.steps.items():
        before, plan = step.committed.policy_version == first.policy_version, step.planned
        used = {ref["trajectory_id"] for ref in plan.samples} if _is_once(last) else set[str]()
        if number < first.step and ((before and plan.phase == first.phase) or not used.isdisjoint(ids)):
            attempts[number] = plan.attempt
    events = log.events_of([StepPlanned.KIND, StepCommitted.KIND, StepFailed.KIND])
    return [e for e in events if _is_of(e, history, attempts) or _is_attempt_before(e, history, last)]


def _is_attempt_before(event: Event, history: History, plan: StepPlanned) -> bool:
    """Whether an event belongs to an earlier attempt at this plan's step."""
    record = event.record
    return (
        isinstance(record, StepPlanned | StepFailed)
        and (event.run, record.policy, record.step) == (history.run, plan.policy, plan.step)
        and record.attempt < plan.attempt
    )


def _is_once(plan: StepPlanned) -> bool:
    """Whether each sample is used once; else epochs go over all of them, which no excerpt has."""
    return plan.schedule is None or plan.schedule["slice"] is None


def _is_of(event: Event, history: History, attempts: Mapping[int, int]) -> bool:
    """Whether an event belongs to one of these attempts at steps: step -> attempt."""
    record = event.record
    if not isinstance(record, _OfStep) or (event.run, record.policy) != (history.run, history.policy):
        return False
    if isinstance(record, StepRetired):
        return record.step in attempts
    return attempts.get(record.step) == record.attempt


def _sampled_by(rows: Rows, policy: str) -> set[int]:
    """The versions of the policy that sampled tokens in these rows."""
    versions: set[int] = set()
    for table in rows.values():
        spans = pc.list_flatten(table["version_spans"])
        if isinstance(spans, pa.ChunkedArray):
            spans = spans.combine_chunks()
        mine = spans.filter(pc.equal(pc.struct_field(spans, "policy"), policy))
        versions.update(pc.struct_field(mine, "version").unique().to_pylist())
    return versions
