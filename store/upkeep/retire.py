"""Retires committed steps: they can no longer be replayed, and retention may drop the data only they
needed.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from rollbook.store.errors import UpkeepError
from rollbook.store.events import Event, StepRetired
from rollbook.store.log.store import Store
from rollbook.store.upkeep.claim import UPKEEP_LANE, training_claim
from rollbook.store.upkeep.retention_policy import training_histories

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True, slots=True)
class RetireReport:
    """The steps of a policy that were retired now, and how many of the requested ones were retired before."""

    run: str
    policy: str
    steps: tuple[int, ...]
    before: int


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of `A-B`, or of `A`.

    Raises:
        UpkeepError: it is neither.
    """
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise UpkeepError(f"--steps {text!r}: write a step or a range with its end, such as 7 or 0-99")
    return first, last


def retire_steps(
    log: Store,
    run: str,
    policy: str,
    reason: str,
    *,
    steps: tuple[int, int] | None = None,
    before_version: int | None = None,
) -> RetireReport:
    """Retire planned steps `first <= step <= last`, or those that made a version up to `before_version`.

    Steps that did not commit may still run, so they are retired only while nobody trains the policy.

    Raises:
        UpkeepError: neither or both of `steps` and `before_version`, or no such step.
        LaneLockedError: a step that did not commit is among them, and a trainer is at work.
    """
    if (steps is None) == (before_version is None):
        raise UpkeepError("name the steps to retire: either --steps A-B or --before-version N")
    known = training_histories(log)
    if (run, policy) not in known:
        trained = ", ".join(f"{p} of {r}" for r, p in sorted(known)) or "none"
        raise UpkeepError(f"no training of policy {policy!r} in run {run!r}; there is: {trained}")
    history = known[run, policy]
    plans = dict(sorted(history.planned.items()))
    if steps is not None:
        wanted = [step for step in plans if steps[0] <= step <= steps[1]]
    else:
        wanted = [step for step, plan in plans.items() if plan.policy_version < (before_version or 0)]
    if not wanted:
        raise UpkeepError(
            f"policy {policy!r} in run {run!r} has no such step: it has {min(plans, default=0)} to "
            f"{max(plans, default=0)}"
        )
    fresh = [step for step in wanted if step not in history.retired]
    what = training_claim(run, policy)
    uncommitted = [step for step in fresh if step not in history.steps.keys() | history.abandoned.keys()]
    with log.claim(what, "retire committed steps only") if uncommitted else contextlib.nullcontext():
        if fresh:
            with log.writer(UPKEEP_LANE) as writer:
                writer.append([Event(StepRetired(step, policy, reason), run) for step in fresh]).result()
    return RetireReport(run, policy, tuple(fresh), len(wanted) - len(fresh))
