"""What a run's training has done so far, folded from its events. Pure.

The weights of a version are a fold too: start at a checkpoint, and take the committed steps after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollbook.store.errors import TrainError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    SampleDropped,
    StepCommitted,
    StepPlanned,
)


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step's manifest with its results."""

    planned: StepPlanned
    committed: StepCommitted


@dataclass(slots=True)
class History:
    """The committed steps, checkpoints and drops of one (run, policy)."""

    run: str
    policy: str
    steps: dict[int, CommittedStep] = field(default_factory=dict)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return max(self.steps, default=-1) + 1

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
        version = self._version_before(step)
        usable: Sequence[CheckpointWritten] = [
            c for c in self.checkpoints if c.policy_version <= version and self._usable(c, phase)
        ]
        if not usable:
            raise TrainError(
                f"run {self.run!r} has no checkpoint of version {version} to start from: the training that "
                "made it was interrupted. Let it finish first, with its own CONFIG"
            )
        base = max(usable, key=lambda c: c.policy_version)
        between = [
            s
            for _, s in sorted(self.steps.items())
            if base.policy_version <= s.planned.policy_version < version
        ]
        return base, between

    def _version_before(self, step: int) -> int:
        if step in self.steps:
            return self.steps[step].planned.policy_version
        last = self.steps.get(step - 1)
        if last is not None:
            return last.committed.policy_version
        return max((c.policy_version for c in self.checkpoints), default=0)

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

    A drop counts when its step committed: an attempt that did not is planned anew, drops and all.
    """
    history = History(run, policy)
    planned: dict[tuple[int, int], tuple[StepPlanned, list[str]]] = {}
    drops: list[str] = []  # of the plan that follows: both were appended together
    for event in events:
        record = event.record
        if event.run != run:
            continue
        if getattr(record, "policy", policy) != policy:
            drops = [] if isinstance(record, StepPlanned) else drops
            continue
        match record:
            case SampleDropped():
                drops.append(record.turn_id)
            case StepPlanned():
                planned[record.step, record.attempt] = (record, drops)
                drops = []
                history.attempts[record.step] = max(record.attempt, history.attempts.get(record.step, 0))
            case StepCommitted():
                manifest, dropped = planned[record.step, record.attempt]
                history.steps[record.step] = CommittedStep(manifest, record)
                history.dropped.update(dropped)
            case CheckpointWritten():
                history.checkpoints.append(record)
    return history
