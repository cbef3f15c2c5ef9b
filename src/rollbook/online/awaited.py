"""What a run waits for, as text made of its state: parts, an evaluation, groups, room. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.online.course import Course
from rollbook.store.patience import waits


@dataclass(frozen=True, slots=True)
class PartState:
    """A part, as far as it may be waited for.

    Attributes:
        since: when it came to this state, in seconds since 1970.
        ready_s: the longest time until it is ready; log: what it prints is there.
    """

    name: str
    state: str
    since: float
    ready_s: float
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
    """

    key: str
    what: str
    since: float
    until: float | None

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
    found = [_part(part) for part in parts if part.state in ("starting", "starting again")]
    trainer = next((part for part in parts if part.name == "trainer" and part.state == "running"), None)
    if limits is not None and trainer is not None:
        found += _training(course, trainer, limits)
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
    return Awaited(f"part {part.name}", what, part.since, part.since + part.ready_s)


def _training(course: Course, trainer: PartState, limits: Limits) -> list[Awaited]:
    if course.steps is None or course.changed is None:
        what = f"the trainer to read its model and the log; {trainer.log} says what it does"
        return [Awaited("trainer", what, trainer.since, None)]
    if course.evaluating is not None:
        what = f"agents to be evaluated at version {course.evaluating}: {course.agents.said}"
        until = course.changed + limits.evaluation_s
        return [Awaited(f"evaluation {course.evaluating}", what, course.changed, until)]
    if course.done >= course.steps or course.in_step:
        return []
    running, whole = course.groups
    what = f"groups for step {course.done + 1} of {course.steps}: {whole} of {limits.groups} are there"
    what += f", {running} run" if running else ", none runs"
    return [Awaited(f"step {course.done}", what, course.changed, course.changed + limits.idle_s)]
