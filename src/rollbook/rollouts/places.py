"""The places of rollouts, and what the log says of each: who runs it, what is left to do, and the
progress of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rollbook.rollouts.outcome import Status
from rollbook.rollouts.tasks import Task
from rollbook.store.events import Json

COLUMNS = ("epoch", "task", "sample", "attempt", "launch_id", "status", "spared")
MOST_SPARED = 10
"""Launches of a place that may fail because the proxy was away, and are not counted as attempts."""
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
    """A launch without an end, whose process is gone.

    Attributes:
        finished: the status that its trajectory was finished with; None: it is not.
    """

    place: Place
    attempt: int
    launch_id: str
    trajectory_id: str
    finished: str | None = None


@dataclass(slots=True)
class RolloutProgress:
    """What the log says of rollouts of one name.

    Attributes:
        attempts: place -> attempts that were begun; spared: those of them that failed because the proxy was
            away.
        launches: place -> the launch of the last attempt.
        ended: place -> how its last attempt ended.
        orphans: launch -> one that no end was recorded of.
        unlaunched: names of trajectories whose process died before it told of their launch.
    """

    attempts: dict[Place, int] = field(default_factory=dict)
    spared: dict[Place, int] = field(default_factory=dict)
    launches: dict[Place, str] = field(default_factory=dict)
    ended: dict[Place, Status] = field(default_factory=dict)
    orphans: dict[str, Orphan] = field(default_factory=dict)
    unlaunched: frozenset[str] = frozenset()

    def open(self, place: Place, most: int) -> bool:
        """Whether something is left to do there, with at most so many attempts."""
        status = self.ended.get(place)
        if status is None:
            return True
        again = status in (Status.infra_error, Status.cancelled)
        # Whoever cancelled one wants it when the rollouts go on.
        counted = more_attempts(self.attempts.get(place, 0), self.spared.get(place, 0), most)
        return again and (status is Status.cancelled or counted)


def more_attempts(begun: int, spared: int, most: int) -> bool:
    """Whether a place has another attempt.

    Args:
        begun: attempts so far; spared: those of them that failed because the proxy was away.
        most: attempts beside these.
    """
    return begun - min(spared, MOST_SPARED) < most


def read_course(answer: Json) -> RolloutProgress:
    """What a proxy says of rollouts (`ingest.trajectories.launches`)."""
    course, columns = RolloutProgress(), answer["places"]
    rows = zip(*(columns[name] for name in COLUMNS), strict=True)
    for epoch, task, sample, attempt, launch_id, status, spared in rows:
        place = Place(epoch, task, sample)
        course.spared[place] = spared
        course.attempts[place], course.launches[place] = attempt, launch_id
        if status is not None:
            course.ended[place] = Status(status)
    for row in answer["orphans"]:
        place = Place(row["epoch"], row["task"], row["sample"])
        orphan = Orphan(place, row["attempt"], row["launch_id"], row["trajectory_id"], row["finished"])
        course.orphans[orphan.launch_id] = orphan
    course.unlaunched = frozenset(answer["unlaunched"])
    return course


def places_of(tasks: Sequence[Task], samples: int, epochs: int | None) -> Iterator[Place]:
    """All places in order: groups one after the other, so that they become whole soon.

    Args:
        epochs: None: no end of them.
    """
    for epoch in itertools.count() if epochs is None else range(epochs):
        for task in tasks:
            for sample in range(samples):
                yield Place(epoch, task.name, sample)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far rollouts are.

    Attributes:
        total: places, None if they come until somebody stops.
        done: those of which nothing is left to do, with those of earlier processes.
        running: launches now.
        by_status: launches of this process that ended.
        reward, rewarded: the mean reward of those that have one, and how many have.
        again: launches that failed because the proxy was away; each is tried again.
        given_up: places whose every attempt failed by its infrastructure.
        leaked: processes that launches left behind.
        infra_failed_rate: the share of launches of this process that failed by their infrastructure.
    """

    total: int | None
    done: int = 0
    running: int = 0
    by_status: Mapping[Status, int] = field(default_factory=dict)
    reward: float | None = None
    rewarded: int = 0
    again: int = 0
    given_up: int = 0
    leaked: int = 0
    infra_failed_rate: float | None = None
