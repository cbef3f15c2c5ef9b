"""What a run says that it waits for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rollbook.online.awaited import Awaited, Limits, PartState, awaited
from rollbook.online.course import Course
from rollbook.store.events import (
    EvalFinished,
    EvalStarted,
    Event,
    LaunchEnded,
    LaunchStarted,
    Record,
    RunOpened,
    StepCommitted,
    StepPlanned,
    TrajectoryFinished,
    TrajectoryOpened,
)

TRAINER = PartState("trainer", "running", 5.0, 300.0, "logs/trainer.log")
LIMITS = Limits(groups=8, idle_s=600.0, evaluation_s=1800.0)
BEGUN = [RunOpened("train", {"steps": 9, "steps_done": 2})]


def _course(*records: Record) -> Course:
    """What these come to, each a second after the one before."""
    found = Course()
    found.take(Event(record, "run", time_us=at * 1_000_000) for at, record in enumerate(records, 100))
    return found


def _planned() -> StepPlanned:
    values: dict[str, Any] = {field.name: None for field in fields(StepPlanned)}
    return StepPlanned(**values | {"step": 2, "attempt": 1, "policy": "actor", "samples": []})


def _evaluation() -> list[Record]:
    """Three of four places are launched; one of them ended, and one failed by its infrastructure."""
    made: list[Record] = [EvalStarted("actor", 3, "p")]
    for at in range(3):
        place = {"epoch": 0, "task": "t", "sample": at}
        made.append(TrajectoryOpened(f"e{at}", f"e{at}", "g", "t", "eval"))
        said: Any = (f"e{at}", f"l{at}", "r.eval.3", place, 1, "python", {}, "o", {})
        made.append(LaunchStarted(*said, places=4))
    made += [LaunchEnded("e0", "l0", "done"), LaunchEnded("e1", "l1", "infra_error")]
    return made


def _said(course: Course, held: int = 0, parts: Any = (TRAINER,), now: float = 200.0) -> list[str]:
    return [one.said(now) for one in awaited(course, parts, LIMITS, held, now)]


def test_a_part() -> None:
    """That is not ready, where its output is, and how long that may take."""
    starting = PartState("proxy", "starting again", 170.0, 300.0, "logs/proxy.log")
    assert _said(Course(), parts=(starting,)) == [
        "waiting for proxy, which is starting again; logs/proxy.log says what it does (for 30 s, until "
        "1970-01-01T00:07:50Z at most)"
    ]


def test_a_trainer_that_has_not_begun() -> None:
    """It reads its model."""
    assert _said(Course())[0].startswith("waiting for the trainer to read its model and the log")


def test_agents_that_are_evaluated() -> None:
    """How many of them ended, of how many, and until when they are awaited."""
    assert _said(_course(*BEGUN, *_evaluation())) == [
        "waiting for agents to be evaluated at version 3: 1 of 4 trajectories ended, 1 run (for 99 s, until "
        "1970-01-01T00:31:41Z at most)"
    ]


def test_groups() -> None:
    """Those that are there, of those that a step takes; none are awaited while a step is taken."""
    opened = [TrajectoryOpened(f"t{at}", f"t{at}", f"g{at}", "t") for at in range(3)]
    there = [*BEGUN, *opened, TrajectoryFinished("t0", "completed")]
    assert _said(_course(*there)) == [
        "waiting for groups for step 3 of 9: 1 of 8 are there, 2 run (for 100 s, until 1970-01-01T00:11:40Z "
        "at most)"
    ]
    assert _said(_course(*there, _planned())) == []
    assert len(_said(_course(*there, _planned(), StepCommitted(2, 1, "actor", 3, {}, {})))) == 1


def test_whom_admission_holds() -> None:
    """How many, and for which version."""
    found = _said(_course(*BEGUN, _planned(), StepCommitted(2, 1, "actor", 3, {}, {}), _planned()), held=12)
    assert found == [
        "waiting for room for 12 new trajectories, which admission holds until the trainer has made version "
        "4 or a later one (for 98 s, as long as it takes)"
    ]


@pytest.mark.parametrize("records", [BEGUN, [*BEGUN, *_evaluation()]])
def test_the_same_wait_has_the_same_key(records: list[Record]) -> None:
    """However much of it is there by now; another one has another."""
    more = [LaunchEnded("e2", "l2", "done"), TrajectoryOpened("x", "x", "g", "t")]
    found: list[list[Awaited]] = [
        awaited(_course(*made), [TRAINER], LIMITS, 0, 200.0)
        for made in (
            records,
            [*records, *more],
            [*records, EvalFinished("actor", 3, "p", "", "", 0, 0, 0, 0, 0, {})],
        )
    ]
    assert found[0][0].key == found[1][0].key
    assert (found[0][0].key == found[2][0].key) == (len(records) == 1)
