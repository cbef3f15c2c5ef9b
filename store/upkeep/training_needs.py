"""Which trajectories the steps of a policy still need, so that each can be replayed. Pure.

A step is replayed from the nearest checkpoint before it that has its optimizer's state, through all steps in
between (`History.starts`); going on with the training begins in the same way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from rollbook.store.events import StepPlanned
from rollbook.store.fold.history import History


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


def needed_by(history: History) -> Iterator[tuple[str, str]]:
    """(trajectory, who needs it) of every step that is not retired, and of going on with the training."""
    of = f"of policy {history.policy!r} in run {history.run!r}"
    for step, plan in sorted(history.pending.items()):
        if step not in history.retired:
            yield from ((t, f"planned step {step} {of}") for t in _trajectories(plan))
    plans, starts = _plans(history), _starts(history)
    reach, who = 1 << 62, ""
    last = max(plans, default=None)
    if last is not None and last not in history.retired:
        reach = _base(starts[plans[last].phase], plans[last].policy_version + 1)
        who = "going on with the training"
    # From the last step down: a step is needed if it, or one after it, starts from it or from before it.
    for step, plan in sorted(plans.items(), key=lambda item: -item[1].policy_version):
        base = _base(starts[plan.phase], plan.policy_version)
        if step not in history.retired and base <= reach:
            reach, who = base, f"step {step}"
        if plan.policy_version >= reach:
            yield from ((t, f"{who} {of}") for t in _trajectories(plan))


def ended_by(history: History, trajectory: str) -> Ended:
    """What could not be done any more without the tokens of a trajectory."""
    plans, starts = _plans(history), _starts(history)
    using = sorted(plan.policy_version for plan in plans.values() if trajectory in _trajectories(plan))

    def read_from(first: int, last: int) -> bool:
        return bisect_right(using, last) > bisect_left(using, first)

    steps = [
        step
        for step, plan in plans.items()
        if step not in history.retired
        and read_from(_base(starts[plan.phase], plan.policy_version), plan.policy_version)
    ]
    last = max(plans, default=None)
    resume = None
    if last is not None and last not in history.retired:
        base = _base(starts[plans[last].phase], plans[last].policy_version + 1)
        resume = base if read_from(base, plans[last].policy_version) else None
    return Ended(tuple(steps), resume)


def _plans(history: History) -> dict[int, StepPlanned]:
    """The plans of the committed steps, in order."""
    return {number: step.planned for number, step in sorted(history.steps.items())}


def _trajectories(plan: StepPlanned) -> set[str]:
    return {ref["trajectory_id"] for ref in plan.samples}


def _starts(history: History) -> dict[str, list[int]]:
    """Phase -> versions of the checkpoints that its steps may be started from, rising."""
    phases = {step.planned.phase for step in history.steps.values()}
    return {phase: sorted(c.policy_version for c in history.starts(phase)) for phase in phases}


def _base(starts: list[int], version: int) -> int:
    """Version of the checkpoint that the state before an update of `version` is restored from.

    Where there is none the step cannot be replayed, and needs its own samples only.
    """
    at = bisect_right(starts, version)
    return starts[at - 1] if at else version
