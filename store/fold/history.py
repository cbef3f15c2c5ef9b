"""What the training of a policy in a run has done so far, folded from its events. Pure.

The trainer, replay, retention and erasure use this history to know what steps consumed. The
weights of a version are a fold too: a checkpoint and the committed steps after it. Abandoned
steps, their versions and the checkpoints of those versions are not part of the history, nor are
checkpoints that were removed.

Agents that are being evaluated at a version have a fold of their own, over the events logged
while a training waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rollbook.store.errors import TrainError
from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    EvalFinished,
    EvalStarted,
    Event,
    Json,
    LaunchEnded,
    LaunchStarted,
    Record,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepFailed,
    StepPlanned,
    StepRetired,
    StopFired,
    TrajectoryOpened,
)
from rollbook.store.fold.checkpoints import held_and_removed, removal_message

KINDS = frozenset(
    record.KIND
    for record in (
        SampleDropped,
        StepPlanned,
        StepCommitted,
        StepFailed,
        StepAbandoned,
        StepRetired,
        CheckpointWritten,
        CheckpointRemoved,
        EvalFinished,
        StopFired,
    )
)
"""Kinds of events that a history is folded from."""

PolicyKey = tuple[str, str]
"""(run, policy)"""
_V = TypeVar("_V", EvalFinished, StopFired)


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step's manifest with its results."""

    planned: StepPlanned
    committed: StepCommitted


@dataclass(slots=True)
class History:
    """The committed steps, checkpoints and drops of one (run, policy).

    Attributes:
        steps: those that committed and were not abandoned.
        checkpoints: those of versions that were not abandoned, without the removed.
        removed: those that were removed and not written again at their path, of all versions.
        dropped: leaf turns of the samples that these steps dropped.
        dropped_of: trajectories of those samples.
        planned: step -> its last plan, whatever became of it.
        attempts: step -> the number of its last attempt.
        abandoned: step -> its `step.abandoned`.
        retired: steps that were given up for replay.
        pending: step -> the last plan of it that neither committed nor failed.
        evaluations, stops: of versions that were not abandoned, by version.
    """

    run: str
    policy: str
    steps: dict[int, CommittedStep] = field(default_factory=dict)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    removed: list[CheckpointRemoved] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    dropped_of: set[str] = field(default_factory=set)
    planned: dict[int, StepPlanned] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    abandoned: dict[int, StepAbandoned] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    pending: dict[int, StepPlanned] = field(default_factory=dict)
    evaluations: list[EvalFinished] = field(default_factory=list)
    stops: list[StopFired] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """Number of the next step. A number is never reused."""
        return max([*self.steps, *self.abandoned], default=-1) + 1

    @property
    def over(self) -> bool:
        """Whether every step that was not abandoned is retired. False while there is no step."""
        steps = self.planned.keys() - (self.abandoned.keys() - self.retired)
        return bool(steps) and steps <= self.retired

    def of_family(self, family: str) -> list[CommittedStep]:
        """Committed steps of a configuration, in order: of all the phases it was trained in."""
        return [s for _, s in sorted(self.steps.items()) if family_of(s.planned.phase) == family]

    def evaluations_of(self, family: str) -> list[EvalFinished]:
        """Evaluations of a configuration's versions, in order: of all the phases it was trained in."""
        return [e for e in self.evaluations if family_of(e.phase) == family]

    def phase_to_train(self, family: str) -> str:
        """The phase that goes on or begins when a configuration is trained now.

        A phase is an unbroken row of steps: one that another configuration's steps followed is over,
        and its configuration begins a further one (`family#2`), with a new optimizer.
        """
        last = self.steps[max(self.steps)].planned.phase if self.steps else ""
        if family_of(last) == family:
            return last
        phases = {s.planned.phase for s in self.of_family(family)}
        return f"{family}#{len(phases) + 1}" if phases else family

    def of_phase(self, phase: str) -> list[CommittedStep]:
        """The phase's committed steps, in order."""
        return [s for _, s in sorted(self.steps.items()) if s.planned.phase == phase]

    def consumed(self) -> set[str]:
        """Leaf turns of every sample that a committed step consumed, and of the rollout batch in hand."""
        used = {ref["turn_id"] for step in self.steps.values() for ref in step.planned.samples}
        return used | {ref["turn_id"] for step in self.in_hand()[:1] for ref in all_samples(step.planned)}

    def in_hand(self) -> list[CommittedStep]:
        """The committed steps of a rollout batch on which more steps are to be taken; empty if
        there is none."""
        if not self.steps:
            return []
        last = self.steps[max(self.steps)].planned.rollout_batch
        if last is None or last["number"] + 1 == last["steps"]:
            return []
        return [
            step
            for _, step in sorted(self.steps.items())
            if (batch := step.planned.rollout_batch) is not None and batch["first_step"] == last["first_step"]
        ]

    def beginning(self, step: CommittedStep) -> CommittedStep:
        """The first committed step on a step's rollout batch, whose manifest names all of its samples."""
        batch = step.planned.rollout_batch
        if batch is None or "samples" in batch:
            return step
        same = (other for _, other in sorted(self.steps.items()) if other.planned.rollout_batch is not None)
        begun = (o for o in same if (o.planned.rollout_batch or {})["first_step"] == batch["first_step"])
        return next(begun, step)

    def batch_of(self, plan: StepPlanned) -> list[Json]:
        """References to the samples of the whole rollout batch that a committed step is taken on."""
        batch = plan.rollout_batch
        if batch is None or "samples" in batch:
            return all_samples(plan)
        same = (s.planned for _, s in sorted(self.steps.items()) if s.planned.rollout_batch is not None)
        begun = (p for p in same if p.rollout_batch and p.rollout_batch["first_step"] == batch["first_step"])
        return all_samples(next(begun))

    def trained_trajectories(self) -> set[str]:
        """Trajectories of which a committed step consumed a sample, or the rollout batch in hand has one."""
        refs = [ref for step in self.steps.values() for ref in step.planned.samples]
        refs += (ref for step in self.in_hand()[:1] for ref in all_samples(step.planned))
        return {ref["trajectory_id"] for ref in refs}

    def used_trajectories(self) -> set[str]:
        """Trajectories of which a committed step consumed or dropped a sample."""
        refs = (ref for step in self.steps.values() for ref in step.planned.samples)
        return {ref["trajectory_id"] for ref in refs} | self.dropped_of

    @property
    def version(self) -> int:
        """The policy's newest version, which training goes on from."""
        return self._version_before(self.next_step)

    def bases_for(self, step: int, phase: str) -> list[CheckpointWritten]:
        """The checkpoints from which the state before `step` can be reached, the nearest first.

        Raises:
            TrainError: there is none.
        """
        version = self._version_before(step)
        usable = [c for c in self.starts(phase) if c.policy_version <= version]
        if not usable:
            there = ", ".join(str(v) for v in self.held_versions) or "none"
            raise TrainError(
                f"run {self.run!r} has no checkpoint of version {version} to start from: the training that "
                "made it was interrupted. Let it finish first, with its own CONFIG; or give its last steps "
                f"up: --abandon-after VERSION (checkpoints: {there}){self.why_gone(version)}"
            )
        # Of several checkpoints of one version the last written, since an earlier one may be damaged.
        return sorted(usable, key=lambda c: c.policy_version)[::-1]

    @property
    def held_versions(self) -> list[int]:
        """The versions of which there is a checkpoint, rising."""
        return sorted({c.policy_version for c in self.checkpoints})

    def why_gone(self, version: int) -> str:
        """A sentence to end an error about a version whose checkpoint was removed; otherwise empty."""
        removed = [r for r in self.removed if r.policy_version == version]
        if not removed or version in gone_versions(self.abandoned.values()):
            return ""
        return f". {removal_message(removed[-1])}"

    def between(self, base: CheckpointWritten, step: int) -> list[CommittedStep]:
        """The steps that lead from a checkpoint to the state before `step`, in order."""
        first, end = base.policy_version, self._version_before(step)
        return [s for _, s in sorted(self.steps.items()) if first <= s.planned.policy_version < end]

    def _version_before(self, step: int) -> int:
        if step in self.steps:
            return self.steps[step].planned.policy_version
        versions = [s.committed.policy_version for s in self.steps.values()]
        return max([*versions, *self.held_versions], default=0)

    def starts(self, phase: str) -> list[CheckpointWritten]:
        """The checkpoints that steps of a phase may be started from.

        These are the phase's own checkpoints with the optimizer's state, and the one before its
        first step, where the optimizer is new.
        """
        first = next(iter(self.of_phase(phase)), None)
        start = first.planned.policy_version if first else self._version_before(self.next_step)
        return [
            c
            for c in self.checkpoints
            if (c.phase == phase and c.optimizer_digest is not None) or c.policy_version == start
        ]


def all_samples(plan: StepPlanned) -> list[Json]:
    """References to the samples of the whole rollout batch that a plan begins."""
    batch = plan.rollout_batch
    return plan.samples if batch is None else batch["samples"]


def family_of(phase: str) -> str:
    """The configuration that a phase belongs to."""
    return phase.partition("#")[0]


def fold_history(events: Iterable[Event], run: str, policy: str) -> History:
    """The training history of a policy in a run."""
    return fold_histories(e for e in events if e.run == run).get((run, policy), History(run, policy))


def with_drops(events: Iterable[Event]) -> Iterator[tuple[Event, list[tuple[Event, SampleDropped]]]]:
    """Each event that is no drop; a plan with the drops that its lane has noted since the plan before, else
    with none. Those that no plan of their lane follows are of no step."""
    waiting: dict[str, list[tuple[Event, SampleDropped]]] = {}
    for event in events:
        if isinstance(event.record, SampleDropped):
            waiting.setdefault(event.lane, []).append((event, event.record))
        else:
            yield event, waiting.pop(event.lane, []) if isinstance(event.record, StepPlanned) else []


def fold_histories(events: Iterable[Event]) -> dict[PolicyKey, History]:
    """The training histories of all policies. Events of one lane come in order, lanes in any.

    A drop counts only if its step committed. Failed attempts and abandoned steps are planned anew, including
    their drops.
    """
    builders: dict[PolicyKey, _HistoryBuilder] = {}
    for event, drops in with_drops(events):
        record = event.record
        if isinstance(record, _OF_POLICY):
            key = (event.run, record.policy)
            builder = builders.setdefault(key, _HistoryBuilder(History(*key)))
            if isinstance(record, StepPlanned):
                builder.plans[record.step, record.attempt] = record, [drop for _, drop in drops]
            else:
                builder.take(record, event)
    return {key: builder.settled() for key, builder in builders.items()}


_Other = (
    StepCommitted
    | StepFailed
    | StepAbandoned
    | StepRetired
    | CheckpointWritten
    | CheckpointRemoved
    | EvalFinished
    | StopFired
)
_OF_POLICY = StepPlanned | _Other


@dataclass(slots=True)
class _HistoryBuilder:
    """The events of one history, in whatever order lanes were read."""

    history: History
    plans: dict[tuple[int, int], tuple[StepPlanned, list[SampleDropped]]] = field(default_factory=dict)
    committed: dict[int, StepCommitted] = field(default_factory=dict)
    failed: set[tuple[int, int]] = field(default_factory=set)
    folders: list[Event] = field(default_factory=list)
    """Of checkpoints that were written or removed."""

    def take(self, record: _Other, event: Event) -> None:
        """Take an event that is no plan."""
        match record:
            case StepCommitted():
                self.committed[record.step] = record
            case StepFailed():
                self.failed.add((record.step, record.attempt))
            case StepAbandoned():
                self.history.abandoned[record.step] = record
            case StepRetired():
                self.history.retired.add(record.step)
            case CheckpointWritten() | CheckpointRemoved():
                self.folders.append(event)
            case EvalFinished():
                self.history.evaluations.append(record)
            case StopFired():
                self.history.stops.append(record)

    def settled(self) -> History:
        """The history, once all events are there."""
        history = self.history
        for (step, attempt), (planned, _) in sorted(self.plans.items(), key=lambda plan: plan[0]):
            history.planned[step], history.attempts[step] = planned, attempt
            if step not in self.committed and (step, attempt) not in self.failed:
                history.pending[step] = planned
        for step, committed in sorted(self.committed.items()):
            plan = self.plans.get((step, committed.attempt))
            if plan is None or step in history.abandoned:
                continue  # retention dropped its plan, or it was taken back
            history.steps[step] = CommittedStep(plan[0], committed)
            history.dropped |= {drop.turn_id for drop in plan[1]}
            history.dropped_of |= {drop.trajectory_id for drop in plan[1]}
        gone = gone_versions(history.abandoned.values())
        held, history.removed = held_and_removed(self.folders)
        history.checkpoints = [c for c in held if c.policy_version not in gone]
        history.evaluations = _by_version(history.evaluations, gone)
        history.stops = _by_version(history.stops, gone)
        return history


def _by_version(records: Iterable[_V], gone: set[int]) -> list[_V]:
    """Those of versions that were not abandoned, sorted by version, since lanes come in any order."""
    return sorted((r for r in records if r.policy_version not in gone), key=lambda r: r.policy_version)


def gone_versions(abandoned: Iterable[StepAbandoned]) -> set[int]:
    """Versions that abandoned steps made, and numbers under which training went on from such a one."""
    records = list(abandoned)
    gone = {record.policy_version for record in records}
    for back_to, goes_on_as in sorted({(r.back_to, r.goes_on_as) for r in records}):
        if back_to in gone:  # the number is higher: whatever went back to it comes later in this order
            gone.add(goes_on_as)
    return gone


EVALUATION_KINDS = frozenset(
    record.KIND for record in (EvalStarted, TrajectoryOpened, LaunchStarted, LaunchEnded)
)
CAME_TO_AN_END = ("done", "truncated", "agent_error", "timeout")
"""How launches end that are not tried again: the others say nothing of their agent."""


@dataclass(slots=True)
class EvaluatedAgents:
    """The agents evaluated since the last `eval.started`.

    Attributes:
        rollout: the name of their launches; None: none was launched.
        expected: how many there are to be; None: nobody said.
        ended: places whose agent came to an end.
    """

    rollout: str | None = None
    expected: int | None = None
    ended: set[tuple[int, str | None, int]] = field(default_factory=set)
    _opened: set[str] = field(default_factory=set)
    _launched: dict[str, tuple[int, str | None, int]] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Fold an event."""
        match record:
            case EvalStarted():
                self.rollout = self.expected = None
                self.ended, self._opened, self._launched = set(), set(), {}
            case TrajectoryOpened(split="eval"):
                self._opened.add(record.trajectory_id)
            case LaunchStarted() if record.trajectory_id in self._opened:
                self._opened.discard(record.trajectory_id)
                coordinates = record.place
                self.rollout, self.expected = record.rollout, record.places or self.expected
                self._launched[record.launch_id] = (
                    coordinates["epoch"],
                    coordinates.get("task"),
                    coordinates["sample"],
                )
            case LaunchEnded() if record.launch_id in self._launched:
                place = self._launched.pop(record.launch_id)
                if record.status in CAME_TO_AN_END:
                    self.ended.add(place)

    @property
    def in_words(self) -> str:
        """Their progress, in words."""
        if self.rollout is None:
            return "none was launched yet"
        expected = "" if self.expected is None else f" of {self.expected}"
        return f"{len(self.ended)}{expected} trajectories ended, {len(self._launched)} run"
