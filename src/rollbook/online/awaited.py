"""What a run waits for, as text made of its state (parts, an evaluation, groups, a step, room), and when that
is said. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollbook.online.course import Course
from rollbook.online.supervisor import LINGER_S
from rollbook.store.patience import SAY_AFTER_S, SAY_AGAIN_S, Patience, waits

QUIET_S = (SAY_AFTER_S, 20.0, 30.0, SAY_AGAIN_S)
"""Pauses between what is said in a silence: it is broken after 10 s, 30 s and 60 s, and then each minute."""


@dataclass(frozen=True, slots=True)
class PartState:
    """A part, as far as it may be waited for.

    Attributes:
        since: when it came to this state, in seconds since 1970.
        ready_s: the longest time until it is ready, and stop_s until it has ended, once it is asked to.
        log: what it prints is there.
    """

    name: str
    state: str
    since: float
    ready_s: float
    stop_s: float
    log: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the training: groups of a step, and for how long it waits for one, and for an evaluation."""

    groups: int
    idle_s: float
    evaluation_s: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """One thing that is waited for.

    Attributes:
        key: the same while it is the same wait.
        since: when the wait began, and until: when it ends at the latest, in seconds since 1970; None: never.
        work: it is what the run is for: who reads of it each minute, however often it begins anew, knows it.
    """

    key: str
    what: str
    since: float
    until: float | None
    work: bool = False

    def said(self, now: float) -> str:
        """In a line."""
        return waits(self.what, now - self.since, None if self.until is None else self.until - now, now)


def awaited(
    course: Course, parts: Sequence[PartState], limits: Limits | None, held: int, now: float
) -> list[Awaited]:
    """All that a run waits for now.

    Args:
        limits: None where nothing is trained.
        held: trajectories that admission holds.
    """
    found = [_part(part) for part in parts if part.state in ("starting", "starting again", "stopping")]
    by_name = {part.name: part for part in parts}
    trainer, rollouts = by_name.get("trainer"), by_name.get("rollouts")
    if limits is not None and trainer is not None and trainer.state == "running":
        found += _training(course, trainer, limits)
    elif rollouts is not None and rollouts.state == "running" and not found:
        found.append(_rollouts(course, rollouts, trainer))
    if held:
        found.append(
            Awaited(
                "admission",
                f"room for {held} new trajectories, which admission holds until the trainer has made "
                f"version {course.version + 1} or a later one",
                course.changed or now,
                None,
            )
        )
    return found


def _part(part: PartState) -> Awaited:
    what = f"{part.name}, which is {part.state}; {part.log} says what it does"
    limit_s = part.stop_s if part.state == "stopping" else part.ready_s
    return Awaited(f"part {part.name}", what, part.since, part.since + limit_s)


def _training(course: Course, trainer: PartState, limits: Limits) -> list[Awaited]:
    where = f"; {trainer.log} says what it does"
    if course.steps is None or course.changed is None or (course.opened or 0.0) < trainer.since:
        what = f"the trainer to read its model and the log{where}"
        return [Awaited("trainer", what, trainer.since, None)]
    if course.evaluating is not None:
        what = f"agents to be evaluated at version {course.evaluating}: {course.agents.said}"
        until = course.changed + limits.evaluation_s
        return [Awaited(f"evaluation {course.evaluating}", what, course.changed, until)]
    if course.planned is not None:
        what = f"the trainer to take step {course.done + 1} of {course.steps}{where}"
        return [Awaited("step", what, course.planned, None, work=True)]
    if course.done >= course.steps:
        what = f"the trainer to end, after step {course.done} of {course.steps}{where}"
        return [Awaited("trainer's end", what, course.changed, None)]
    running, whole = course.groups
    if whole >= limits.groups:
        what = f"the trainer to plan step {course.done + 1} of {course.steps}: {whole} groups are there"
        return [Awaited("plan", what, course.changed, None, work=True)]
    what = f"groups for step {course.done + 1} of {course.steps}: {whole} of {limits.groups} are there"
    what += f", {running} run" if running else ", none runs"
    return [Awaited(f"step {course.done}", what, course.changed, course.changed + limits.idle_s)]


def _rollouts(course: Course, rollouts: PartState, trainer: PartState | None) -> Awaited:
    """Rollouts without a training, or after it."""
    what = f"the rollouts to end: {course.launched} run, {sum(course.ended.values())} ended"
    if trainer is None or trainer.state != "ended":
        return Awaited("rollouts", what, rollouts.since, None, work=True)
    return Awaited("rollouts' end", what, trainer.since, trainer.since + LINGER_S)


@dataclass(slots=True)
class Silence:
    """What breaks the silence of a console: each wait after 10 s, and again each minute; and all of them
    where no other line is printed for long. Work is said each minute at most.

    Attributes:
        heard: when another line was printed, in seconds since 1970.
    """

    heard: float
    _patience: dict[str, Patience] = field(default_factory=dict)
    _work: float = -math.inf
    """When a wait for work was said last."""
    _quiet: list[float] = field(default_factory=list)
    """When waits were said since another line was printed."""

    def hear(self, now: float) -> None:
        """Another line is printed."""
        self.heard = now
        self._quiet.clear()

    def due(self, found: Sequence[Awaited], now: float) -> list[Awaited]:
        """Those that are to be said now, which then count as said."""
        known, self._patience = self._patience, {}
        for one in found:
            self._patience[one.key] = known.get(one.key, Patience(one.since))
        due = [one for one in found if self._patience[one.key].due(now)]
        pause = QUIET_S[min(len(self._quiet), len(QUIET_S) - 1)]
        if now - (self._quiet[-1] if self._quiet else self.heard) >= pause:
            due = list(found)
        due = [one for one in due if not one.work or now - self._work >= SAY_AGAIN_S]
        for one in due:
            self._patience[one.key].said = now
            self._work = now if one.work else self._work
        if due:
            self._quiet.append(now)
        return due
