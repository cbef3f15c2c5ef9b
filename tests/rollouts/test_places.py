"""What the log says of rollouts: what is left to do, and what a process that died left behind."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.ingest.trajectories.launches import rollout_course
from rollbook.rollouts.outcome import ended_as
from rollbook.rollouts.places import Orphan, Place, RolloutProgress, more_attempts, places_of, read_course
from rollbook.rollouts.tasks import Task
from rollbook.store import format_cut
from rollbook.store.events import (
    Event,
    LaunchEnded,
    LaunchStarted,
    Record,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.upkeep.erase import erase_trajectory

PLACE = Place(0, "a", 1)
Read = Callable[..., RolloutProgress]


def _opened(launch: str, rollout: str = "mine") -> TrajectoryOpened:
    return TrajectoryOpened(f"t-{launch}", launch, labels={"rollout": rollout})


def _started(launch: str, place: Place = PLACE, attempt: int = 1, rollout: str = "mine") -> LaunchStarted:
    fields: dict[str, Any] = {"launcher": "subprocess", "isolation": {}, "owner": "o", "clocks": {}}
    return LaunchStarted(f"t-{launch}", launch, rollout, place.described, attempt, **fields)


def _ended(launch: str, status: str) -> LaunchEnded:
    return LaunchEnded(f"t-{launch}", launch, status)


@pytest.fixture
def course(tmp_path: Path) -> Read:
    """What the log says of the rollouts `mine`, with these records in lanes of their own."""

    def read(*lanes: Sequence[Record]) -> RolloutProgress:
        log = rb.open(tmp_path / "store", create=True)
        for number, records in enumerate(lanes):
            if not records:
                continue
            with log.writer(f"serve-{number}") as writer:
                writer.append([Event(record, "run") for record in records]).result()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a proxy would print it
            answer = rollout_course(log, "run", "mine")
        assert answer["cut"] == format_cut(log.head())
        return read_course(answer)

    return read


def test_attempts_that_the_proxys_absence_ended_are_spared(course: Read) -> None:
    """They leave a place open, up to ten of them; what is counted goes by the log, whoever began it."""
    lost = [replace(_ended(f"l{n}", "infra_error"), proxy_away=True) for n in (1, 2)]
    begun = [_started(f"l{n}", attempt=n) for n in (1, 2, 3)]
    progress = course([*(_opened(f"l{n}") for n in (1, 2, 3)), *begun, *lost, _ended("l3", "infra_error")])
    assert (progress.attempts[PLACE], progress.spared[PLACE]) == (3, 2)
    assert (progress.open(PLACE, 1), progress.open(PLACE, 2)) == (False, True)
    assert [more_attempts(begun, begun, 1) for begun in (10, 11)] == [True, False]


def test_places_come_group_by_group() -> None:
    """So that groups become whole soon; each attempt has a name of its own."""
    places = list(places_of([Task("a", {}), Task("b/c", {})], 2, 2))
    assert [(p.epoch, p.task, p.sample) for p in places[:5]] == [
        *[(0, "a", 0), (0, "a", 1), (0, "b/c", 0), (0, "b/c", 1), (1, "a", 0)]
    ]
    assert places[3].group("mine") == "mine.0.b%2Fc"
    assert [places[3].trajectory("mine", n) for n in (1, 2)] == ["mine.0.b%2Fc.1", "mine.0.b%2Fc.1.2"]
    names = {p.trajectory("mine", n) for p in places for n in (1, 2, 3)}
    assert len(names) == 3 * len(places)
    assert list(itertools.islice(places_of([Task("a", {})], 1, None), 3)) == [
        Place(n, "a", 0) for n in range(3)
    ]


@pytest.mark.more_but("done-*", "infra_error-*", "agent_error-*")
@pytest.mark.parametrize(
    ("status", "first", "third"),
    [
        ("done", False, False),
        ("truncated", False, False),
        ("agent_error", False, False),
        ("timeout", False, False),
        ("infra_error", True, False),
        ("cancelled", True, True),
    ],
)
def test_what_is_left_to_do(course: Read, status: str, first: bool, third: bool) -> None:
    """Nothing in a place whose agent came to an end of its own; one more attempt where its infrastructure
    failed, as long as there are any; and always where somebody only stopped it."""
    records = [[_opened(f"l{n}"), _started(f"l{n}", attempt=n), _ended(f"l{n}", status)] for n in (1, 2, 3)]
    single = course(records[0])
    assert (single.open(PLACE, 3), single.attempts, single.launches) == (first, {PLACE: 1}, {PLACE: "l1"})
    many = course([], [*records[1], *records[2]])
    assert (many.open(PLACE, 3), many.attempts, many.launches) == (third, {PLACE: 3}, {PLACE: "l3"})
    assert (many.orphans, many.unlaunched) == ({}, frozenset())


def test_a_launch_without_an_end(course: Read) -> None:
    """Its place is open, and the launch is an orphan, until somebody tells its end."""
    records = [_opened("l1"), _started("l1"), _ended("l1", "infra_error")]
    progress = course([*records, _opened("l2"), _started("l2", attempt=2)])
    assert progress.orphans == {"l2": Orphan(PLACE, 2, "l2", "t-l2")}
    assert (progress.open(PLACE, 2), progress.ended) == (True, {})


def test_other_rollouts_are_not_ours(course: Read) -> None:
    """Of another name."""
    progress = course([_opened("l1", "other"), _started("l1", rollout="other"), _ended("l1", "done")])
    assert (progress.attempts, progress.ended, progress.orphans, progress.unlaunched) == (
        {},
        {},
        {},
        frozenset(),
    )
    assert progress.open(PLACE, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_launches_of_a_place_in_several_lanes(course: Read, order: tuple[int, ...]) -> None:
    """The last attempt decides, whatever its lane is called."""
    statuses = ("infra_error", "infra_error", "done")
    lanes = [
        [_opened(f"l{n}"), _started(f"l{n}", attempt=n + 1), _ended(f"l{n}", statuses[n])] for n in order
    ]
    progress = course(*lanes)
    assert (progress.attempts[PLACE], progress.ended[PLACE], progress.orphans) == (3, "done", {})


@pytest.mark.parametrize(
    ("finished", "status"),
    [("completed", "done"), ("truncated", "truncated"), ("failed", "agent_error"), ("void", "infra_error")],
)
def test_how_a_launch_ended_whose_process_died_after_its_trajectory(
    course: Read, finished: str, status: str
) -> None:
    """By what the trajectory was finished with."""
    progress = course([_opened("l1"), _started("l1"), TrajectoryFinished("t-l1", finished)])
    assert progress.orphans["l1"].finished == finished
    assert ended_as(finished) == status


def test_a_trajectory_without_a_launch(course: Read) -> None:
    """Its process died in between: its name is taken, and it is of these rollouts alone."""
    records = [_opened("l1"), _opened("l2"), _opened("l3", "other"), TrajectoryOpened("t-l4", "l4")]
    assert course([*records, _started("l1")]).unlaunched == {"l2"}


def test_what_was_erased_has_no_place(course: Read, tmp_path: Path) -> None:
    """Its task is gone; the others are as they were."""
    other = Place(0, "b", 0)
    for lane, (launch, place) in enumerate((("l1", PLACE), ("l2", other))):
        records = [_opened(launch), _started(launch, place), _ended(launch, "done")]
        course(*[[]] * lane, [*records, TrajectoryFinished(f"t-{launch}", "completed")])
    log = rb.open(tmp_path / "store")
    erase_trajectory(log, "t-l1", "asked", keep_tokens=False)
    progress = read_course(rollout_course(log, "run", "mine"))
    assert (progress.ended, progress.orphans) == ({other: "done"}, {})
