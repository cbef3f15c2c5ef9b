"""What a run's training has done so far, folded from its events. Pure.

The weights of a version are a fold too: start at a checkpoint, and take the committed steps after it. Steps
that were abandoned are no part of it, nor are the versions that they made and the checkpoints of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollbook.store.errors import TrainError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
)
from rollbook.store.fold.abandoned import gone_versions

KINDS = frozenset(
    record.KIND for record in (SampleDropped, StepPlanned, StepCommitted, StepAbandoned, CheckpointWritten)
)
"""Kinds of events that a history is folded from."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step's manifest with its results."""

    planned: StepPlanned
    committed: StepCommitted


@dataclass(slots=True)
class History:
    """The committed steps, checkpoints and drops of one (run, policy).

    Attributes:
        abandoned: step -> how it was taken back.
    """

    run: str
    policy: str
    steps: dict[int, CommittedStep] = field(default_factory=dict)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    dropped_of: set[str] = field(default_factory=set)
    """Trajectories of the dropped samples."""
    attempts: dict[int, int] = field(default_factory=dict)
    abandoned: dict[int, StepAbandoned] = field(default_factory=dict)

    @property
    def next_step(self) -> int:
        """Number of the step that comes next. None is given twice."""
        return max([*self.steps, *self.abandoned], default=-1) + 1

    def of_family(self, family: str) -> list[CommittedStep]:
        """Committed steps of a configuration, in order: of all the phases it was trained in."""
        return [s for _, s in sorted(self.steps.items()) if family_of(s.planned.phase) == family]

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
        """Leaf turns of every sample that a committed step consumed."""
        return {ref["turn_id"] for step in self.steps.values() for ref in step.planned.samples}

    def used_trajectories(self) -> set[str]:
        """Trajectories of which a committed step consumed or dropped a sample."""
        refs = (ref for step in self.steps.values() for ref in step.planned.samples)
        return {ref["trajectory_id"] for ref in refs} | self.dropped_of

    @property
    def version(self) -> int:
        """The policy's newest version, which training goes on from."""
        return self._version_before(self.next_step)

    def base_for(self, step: int, phase: str) -> tuple[CheckpointWritten, list[CommittedStep]]:
        """Where to start to get the state before `step`, and the steps to take from there.

        A checkpoint of the step's own phase restores the optimizer; at the start of a phase only the
        weights are restored, for the optimizer begins anew.

        Raises:
            TrainError: the log holds no checkpoint to start from.
        """
        base = self.bases_for(step, phase)[0]
        return base, self.between(base, step)

    def bases_for(self, step: int, phase: str) -> list[CheckpointWritten]:
        """The checkpoints from which the state before `step` can be had, the nearest first.

        Raises:
            TrainError: there is none.
        """
        version = self._version_before(step)
        usable = [c for c in self.checkpoints if c.policy_version <= version and self._usable(c, phase)]
        if not usable:
            there = ", ".join(str(v) for v in sorted({c.policy_version for c in self.checkpoints})) or "none"
            raise TrainError(
                f"run {self.run!r} has no checkpoint of version {version} to start from: the training that "
                "made it was interrupted. Let it finish first, with its own CONFIG; or give its last steps "
                f"up: --abandon-after VERSION (checkpoints: {there})"
            )
        # Of one version the one that was written last: an earlier one may have been found damaged.
        return sorted(usable, key=lambda c: c.policy_version)[::-1]

    def between(self, base: CheckpointWritten, step: int) -> list[CommittedStep]:
        """The steps that lead from a checkpoint to the state before `step`, in order."""
        first, end = base.policy_version, self._version_before(step)
        return [s for _, s in sorted(self.steps.items()) if first <= s.planned.policy_version < end]

    def _version_before(self, step: int) -> int:
        if step in self.steps:
            return self.steps[step].planned.policy_version
        made = [s.committed.policy_version for s in self.steps.values()]
        return max([*made, *(c.policy_version for c in self.checkpoints)], default=0)

    def _usable(self, checkpoint: CheckpointWritten, phase: str) -> bool:
        if checkpoint.phase == phase and checkpoint.optimizer_digest is not None:
            return True
        first = next(iter(self.of_phase(phase)), None)
        start = first.planned.policy_version if first else self._version_before(self.next_step)
        return checkpoint.policy_version == start


def family_of(phase: str) -> str:
    """The configuration that a phase belongs to."""
    return phase.partition("#")[0]


def fold_history(events: Iterable[Event], run: str, policy: str) -> History:
    """The training history of a policy in a run.

    A drop counts when its step committed: an attempt that did not is planned anew, drops and all. So is a
    step that was abandoned.
    """
    history = History(run, policy)
    dropped_with: dict[int, list[SampleDropped]] = {}
    planned: dict[tuple[int, int], tuple[StepPlanned, list[SampleDropped]]] = {}
    drops: list[SampleDropped] = []  # of the plan that follows: both were appended together
    for event in events:
        record = event.record
        if event.run != run:
            continue
        if getattr(record, "policy", policy) != policy:
            drops = [] if isinstance(record, StepPlanned) else drops
            continue
        match record:
            case SampleDropped():
                drops.append(record)
            case StepPlanned():
                planned[record.step, record.attempt] = (record, drops)
                drops = []
                history.attempts[record.step] = max(record.attempt, history.attempts.get(record.step, 0))
            case StepCommitted():
                manifest, dropped = planned[record.step, record.attempt]
                history.steps[record.step] = CommittedStep(manifest, record)
                dropped_with[record.step] = dropped
            case StepAbandoned():
                history.abandoned[record.step] = record
            case CheckpointWritten():
                history.checkpoints.append(record)
    _take_back(history)
    dropped = [drop for step in history.steps for drop in dropped_with[step]]
    history.dropped = {drop.turn_id for drop in dropped}
    history.dropped_of = {drop.trajectory_id for drop in dropped}
    return history


def _take_back(history: History) -> None:
    """Leave out what was abandoned: known only at the end, for lanes are read one after the other."""
    for step in history.abandoned:
        history.steps.pop(step, None)
    gone = gone_versions(history.abandoned.values())
    history.checkpoints = [c for c in history.checkpoints if c.policy_version not in gone]
