"""Which trajectories the steps of a policy still need, so that each can be replayed. Pure.

A step is replayed from the nearest checkpoint before it that has its optimizer's state, through all steps in
between; going on with the training begins in the same way. `train.history` decides it so, and a test holds
the two together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollbook.store.events import StepAbandoned
from rollbook.store.fold.abandoned import gone_versions

PolicyKey = tuple[str, str]
"""(run, policy)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """A manifest, as far as it matters here: its input version, phase, and its samples' trajectories."""

    version: int
    phase: str
    trajectories: frozenset[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's version and phase, and whether it holds the optimizer's state."""

    version: int
    phase: str | None
    optimizer: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """What an erasure ends.

    Attributes:
        steps: that could no longer be replayed.
        resume: the version of the checkpoint whose following steps could not be run again to go on with the
            training; None where going on needs nothing of what is erased.
    """

    steps: tuple[int, ...]
    resume: int | None


@dataclass(slots=True)
class Training:
    """What the log says of the training of one policy in a run, its events taken in any order."""

    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    failed: set[tuple[int, int]] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    abandoned: dict[int, StepAbandoned] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether every step was retired that was not abandoned. Without any it has only begun."""
        steps = {step for step, _ in self.plans} - (self.abandoned.keys() - self.retired)
        return bool(steps) and steps <= self.retired

    def done(self) -> dict[int, Plan]:
        """The committed steps that were not abandoned, in order."""
        return {
            s: self.plans[s, a]
            for s, a in sorted(self.committed.items())
            if (s, a) in self.plans and s not in self.abandoned
        }

    def waiting(self) -> dict[int, Plan]:
        """The steps that were planned and neither failed nor committed, with their last such attempt."""
        return {
            s: plan
            for (s, a), plan in sorted(self.plans.items())
            if s not in self.committed and (s, a) not in self.failed
        }

    def needs(self, run: str, policy: str) -> Iterator[tuple[str, str]]:
        """(trajectory, who needs it) of every step that is not retired, and of going on with the training."""
        of = f"of policy {policy!r} in run {run!r}"
        for step, plan in self.waiting().items():
            if step not in self.retired:
                yield from ((t, f"planned step {step} {of}") for t in plan.trajectories)
        done = self.done()
        usable = self._usable(done)
        reach, who = 1 << 62, ""
        last = max(done, default=None)
        if last is not None and last not in self.retired:
            reach = _base(usable[done[last].phase], done[last].version + 1)
            who = "going on with the training"
        # From the last step down: a step is needed if it, or one after it, starts from it or from before it.
        for step, plan in sorted(done.items(), key=lambda item: -item[1].version):
            if step not in self.retired and (base := _base(usable[plan.phase], plan.version)) <= reach:
                reach, who = base, f"step {step}"
            if plan.version >= reach:
                yield from ((t, f"{who} {of}") for t in plan.trajectories)

    def ended_by(self, trajectory: str) -> Ended:
        """What could not be done any more without the tokens of a trajectory."""
        done = self.done()
        usable = self._usable(done)
        using = sorted(plan.version for plan in done.values() if trajectory in plan.trajectories)

        def read_from(first: int, last: int) -> bool:
            return bisect_right(using, last) > bisect_left(using, first)

        steps = [
            step
            for step, plan in done.items()
            if step not in self.retired and read_from(_base(usable[plan.phase], plan.version), plan.version)
        ]
        last = max(done, default=None)
        resume = None
        if last is not None and last not in self.retired:
            base = _base(usable[done[last].phase], done[last].version + 1)
            resume = base if read_from(base, done[last].version) else None
        return Ended(tuple(steps), resume)

    def _usable(self, done: dict[int, Plan]) -> dict[str, list[int]]:
        """Phase -> versions of the checkpoints that its steps may be started from, rising.

        Those of the phase with the optimizer's state; and that before its first step, whose optimizer is new.
        """
        starts, gone = dict[str, int](), gone_versions(self.abandoned.values())
        for plan in done.values():
            starts[plan.phase] = min(plan.version, starts.get(plan.phase, plan.version))
        return {
            phase: sorted(
                c.version
                for c in self.checkpoints
                if c.version not in gone and ((c.phase == phase and c.optimizer) or c.version == start)
            )
            for phase, start in starts.items()
        }


def _base(usable: list[int], version: int) -> int:
    """Version of the checkpoint that the state before an update of `version` is restored from.

    Where there is none the step cannot be replayed, and needs its own samples only.
    """
    at = bisect_right(usable, version)
    return usable[at - 1] if at else version
