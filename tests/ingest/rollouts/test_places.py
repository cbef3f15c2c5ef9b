"""What the log says of rollouts: what is left to do, and what a process that died left behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.ingest.rollouts.outcome import ended_as
from rollbook.ingest.rollouts.places import Course, Orphan, Place, course_of, places_of
from rollbook.ingest.rollouts.tasks import Task
from rollbook.store.events import Event, LaunchEnded, LaunchStarted, TrajectoryFinished, TrajectoryOpened

PLACE = Place(0, "a", 1)


def _started(launch: str, place: Place = PLACE, attempt: int = 1, rollout: str = "mine") -> Event:
    fields: dict[str, Any] = {"launcher": "subprocess", "isolation": {}, "owner": "o", "clocks": {}}
    record = LaunchStarted(f"t-{launch}", launch, rollout, place.described, attempt, **fields)
    return Event(record, "run")


def _ended(launch: str, status: str) -> Event:
    return Event(LaunchEnded(f"t-{launch}", launch, status), "run")


def _course(*events: Event) -> Course:
    return course_of(events, "mine")


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
def test_what_is_left_to_do(status: str, first: bool, third: bool) -> None:
    """Nothing in a place whose agent came to an end of its own; one more attempt where its infrastructure
    failed, as long as there are any; and always where somebody only stopped it."""
    one = _course(_started("l1"), _ended("l1", status))
    assert (one.open(PLACE, 3), one.attempts) == (first, {PLACE: 1})
    many = _course(*(e for n in (1, 2, 3) for e in (_started(f"l{n}", attempt=n), _ended(f"l{n}", status))))
    assert (many.open(PLACE, 3), many.attempts) == (third, {PLACE: 3})


def test_a_launch_without_an_end() -> None:
    """Its place is open, and the launch is an orphan, until somebody tells its end."""
    course = _course(_started("l1"), _ended("l1", "infra_error"), _started("l2", attempt=2))
    assert course.orphans == {"l2": Orphan(PLACE, 2, "l2", "t-l2")}
    assert (course.open(PLACE, 2), course.ended) == (True, {})


def test_other_rollouts_are_not_ours() -> None:
    """Of another name."""
    course = _course(_started("l1", rollout="other"), _ended("l1", "done"))
    assert (course.attempts, course.ended, course.orphans) == ({}, {}, {})
    assert course.open(PLACE, 1)


@given(st.permutations(range(4)))
def test_lanes_are_read_in_any_order(order: list[int]) -> None:
    """Launches of a place in several lanes, each before its end: the last attempt decides."""
    pairs = [(_started(f"l{n}", attempt=n + 1), _ended(f"l{n}", "infra_error")) for n in range(4)]
    pairs[3] = (pairs[3][0], _ended("l3", "done"))
    course = _course(*(event for n in order for event in pairs[n]))
    assert (course.attempts[PLACE], course.ended[PLACE], course.orphans) == (4, "done", {})


@pytest.mark.parametrize(
    ("finished", "status"),
    [("completed", "done"), ("truncated", "truncated"), ("failed", "agent_error"), ("void", "infra_error")],
)
def test_how_a_launch_ended_whose_process_died_after_its_trajectory(finished: str, status: str) -> None:
    """By what the trajectory was finished with."""
    course = _course(_started("l1"), Event(TrajectoryFinished("t-l1", finished), "run"))
    assert ended_as(course.finished[course.orphans["l1"].trajectory_id]) == status


def test_a_trajectory_without_a_launch() -> None:
    """Its process died in between: its name is taken, and it is of these rollouts alone."""
    opened = [
        Event(TrajectoryOpened(f"t-{name}", name, labels={"rollout": of}), "run")
        for name, of in (("l1", "mine"), ("l2", "mine"), ("l3", "other"))
    ]
    course = _course(*opened, _started("l1"), Event(TrajectoryOpened("t-l4", "l4"), "run"))
    assert course.unlaunched == {"l2"}
