"""The places of rollouts, and what the log says of each: who runs it, and what is left to do. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rollbook.ingest.rollouts.outcome import Status
from rollbook.ingest.rollouts.tasks import Task
from rollbook.store.events import (
    Event,
    Json,
    LaunchEnded,
    LaunchStarted,
    TrajectoryFinished,
    TrajectoryOpened,
)

KINDS = (TrajectoryOpened.KIND, TrajectoryFinished.KIND, LaunchStarted.KIND, LaunchEnded.KIND)
LABEL = "rollout"
"""Label of a trajectory that says which rollouts it is of."""
OPENING = "opening"
"""Label by which a proxy knows a request to open one again, whose answer was lost."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A trajectory's place: of an epoch, a task, and a group."""

    epoch: int
    task: str
    sample: int

    @property
    def described(self) -> Json:
        """As the log has it."""
        return {"epoch": self.epoch, "task": self.task, "sample": self.sample}

    def group(self, rollout: str) -> str:
        """The name of its group."""
        return f"{rollout}.{self.epoch}.{quote(self.task, safe='')}"

    def trajectory(self, rollout: str, attempt: int) -> str:
        """The name of its trajectory; each attempt has its own."""
        again = "" if attempt == 1 else f".{attempt}"
        return f"{self.group(rollout)}.{self.sample}{again}"


@dataclass(frozen=True, slots=True)
class Orphan:
    """A launch without an end, whose process is gone."""

    place: Place
    attempt: int
    launch_id: str
    trajectory_id: str


@dataclass(slots=True)
class Course:
    """What the log says of rollouts of one name.

    Attributes:
        attempts: place -> attempts that were begun.
        ended: place -> how its last attempt ended.
        orphans: launch -> one that no end was recorded of.
        unlaunched: names of trajectories whose process died before it told of their launch.
        finished: trajectory -> the status that it was finished with.
    """

    attempts: dict[Place, int] = field(default_factory=dict)
    ended: dict[Place, Status] = field(default_factory=dict)
    orphans: dict[str, Orphan] = field(default_factory=dict)
    unlaunched: frozenset[str] = frozenset()
    finished: dict[str, str] = field(default_factory=dict)

    def open(self, place: Place, most: int) -> bool:
        """Whether something is left to do there, with at most so many attempts."""
        status = self.ended.get(place)
        if status is None:
            return True
        again = status in (Status.infra_error, Status.cancelled)
        # Whoever cancelled one wants it when the rollouts go on.
        return again and (status is Status.cancelled or self.attempts.get(place, 0) < most)


def course_of(events: Iterable[Event], rollout: str) -> Course:
    """Fold the launches of the rollouts of a name, and what became of their trajectories."""
    course, running = Course(), dict[str, Orphan]()
    opened, launched = dict[str, str](), set[str]()
    for event in events:
        match event.record:
            case TrajectoryOpened() as record if record.labels.get(LABEL) == rollout:
                opened[record.trajectory_id] = record.name
            case TrajectoryFinished() as record:
                course.finished[record.trajectory_id] = record.status
            case LaunchStarted() as record if record.rollout == rollout:
                launched.add(record.trajectory_id)
                place = _place(record)
                running[record.launch_id] = Orphan(
                    place, record.attempt, record.launch_id, record.trajectory_id
                )
                if record.attempt >= course.attempts.get(place, 0):
                    course.attempts[place] = record.attempt
                    course.ended.pop(place, None)
            case LaunchEnded() as record if record.launch_id in running:
                orphan = running.pop(record.launch_id)
                if orphan.attempt == course.attempts[orphan.place]:
                    course.ended[orphan.place] = Status(record.status)
    course.orphans = running
    course.unlaunched = frozenset(name for one, name in opened.items() if one not in launched)
    return course


def scored_launches(events: Iterable[Event], rollout: str) -> Iterator[tuple[Place, int, str]]:
    """The launches of the rollouts of a name that ended so that they have a reward: place, attempt and id."""
    running: dict[str, LaunchStarted] = {}
    for event in events:
        match event.record:
            case LaunchStarted() as record if record.rollout == rollout:
                running[record.launch_id] = record
            case LaunchEnded() as record if record.launch_id in running:
                started = running.pop(record.launch_id)
                if Status(record.status).rewarded:
                    yield _place(started), started.attempt, record.launch_id


def _place(started: LaunchStarted) -> Place:
    return Place(started.place["epoch"], started.place["task"], started.place["sample"])


def places_of(tasks: Sequence[Task], samples: int, epochs: int | None) -> Iterator[Place]:
    """All places in order: groups one after the other, so that they become whole soon.

    Args:
        epochs: None: no end of them.
    """
    for epoch in itertools.count() if epochs is None else range(epochs):
        for task in tasks:
            for sample in range(samples):
                yield Place(epoch, task.name, sample)
