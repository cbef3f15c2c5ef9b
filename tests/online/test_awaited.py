"""What a run says that it waits for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from rollbook.online.progress import Awaited, Limits, PartState, RunProgress, Silence, awaited
from rollbook.store.events import (
    EvalFinished,
    EvalStarted,
    Event,
    LaunchEnded,
    LaunchStarted,
    Record,
    RunOpened,
    StepCommitted,
    StepFailed,
    StepPlanned,
    SyncFinished,
    TrajectoryFinished,
    TrajectoryOpened,
)

TRAINER = PartState("trainer", "running", 5.0, 300.0, 900.0, "logs/trainer.log")
ROLLOUTS = PartState("rollouts", "running", 5.0, 300.0, 16.0, "logs/rollouts.log")
LIMITS = Limits(groups=8, idle_s=600.0, evaluation_s=1800.0)
BEGUN = [RunOpened("train", {"steps": 9, "steps_done": 2})]


def _course(*records: Record) -> RunProgress:
    """What these come to, each a second after the one before."""
    progress = RunProgress()
    progress.take(Event(record, "run", time_us=at * 1_000_000) for at, record in enumerate(records, 100))
    return progress


def _planned() -> StepPlanned:
    values: dict[str, Any] = {field.name: None for field in fields(StepPlanned)}
    return StepPlanned(**values | {"step": 2, "attempt": 1, "policy": "actor", "samples": []})


def _evaluation() -> list[Record]:
    """Three of four places are launched; one of them ended, and one failed by its infrastructure."""
    records: list[Record] = [EvalStarted("actor", 3, "p")]
    for at in range(3):
        place = {"epoch": 0, "task": "t", "sample": at}
        records.append(TrajectoryOpened(f"e{at}", f"e{at}", "g", "t", "eval"))
        launch: Any = (f"e{at}", f"l{at}", "r.eval.3", place, 1, "python", {}, "o", {})
        records.append(LaunchStarted(*launch, places=4))
    records += [LaunchEnded("e0", "l0", "done"), LaunchEnded("e1", "l1", "infra_error")]
    return records


def _lines(course: RunProgress, held: int = 0, parts: Any = (TRAINER,), now: float = 200.0) -> list[str]:
    return [wait.in_words(now) for wait in awaited(course, parts, LIMITS, held, now)]


def test_a_part() -> None:
    """That is not ready, or not at its end: where its output is, and how long that may take."""
    starting = PartState("proxy", "starting again", 170.0, 300.0, 15.0, "logs/proxy.log")
    assert _lines(RunProgress(), parts=(starting,)) == [
        "waiting for proxy, which is starting again; logs/proxy.log says what it does (for 30 s, until "
        "1970-01-01T00:07:50Z at most)"
    ]
    stopping = replace(TRAINER, state="stopping", since=150.0)
    assert _lines(_course(*BEGUN, _planned()), parts=(stopping, ROLLOUTS)) == [
        "waiting for trainer, which is stopping; logs/trainer.log says what it does (for 50 s, until "
        "1970-01-01T00:17:30Z at most)"
    ]


def test_a_trainer_that_has_not_begun() -> None:
    """It reads its model, as does one that was started again in the middle of a step."""
    reads = "waiting for the trainer to read its model and the log"
    assert _lines(RunProgress())[0].startswith(reads)
    again = replace(TRAINER, since=150.0)
    assert [line[: len(reads)] for line in _lines(_course(*BEGUN, _planned()), parts=(again,))] == [reads]


def test_a_proxy_that_begins_again() -> None:
    """It changes nothing of how long groups are waited for."""
    groups = _lines(_course(*BEGUN))
    assert _lines(_course(*BEGUN, RunOpened("serve", {}))) == groups != []


def test_agents_that_are_evaluated() -> None:
    """How many of them ended, of how many, and until when they are awaited."""
    assert _lines(_course(*BEGUN, *_evaluation())) == [
        "waiting for agents to be evaluated at version 3: 1 of 4 trajectories ended, 1 run (for 99 s, until "
        "1970-01-01T00:31:41Z at most)"
    ]


def test_groups() -> None:
    """Those that are there, of those that a step takes; while a step is taken that is waited for."""
    opened = [TrajectoryOpened(f"t{at}", f"t{at}", f"g{at}", "t") for at in range(3)]
    there = [*BEGUN, *opened, TrajectoryFinished("t0", "completed")]
    assert _lines(_course(*there)) == [
        "waiting for groups for step 3 of 9: 1 of 8 are there, 2 run (for 100 s, until 1970-01-01T00:11:40Z "
        "at most)"
    ]
    assert _lines(_course(*there, _planned())) == [
        "waiting for the trainer to take step 3 of 9; logs/trainer.log says what it does (for 95 s, as long "
        "as it takes)"
    ]
    for ended in (StepCommitted(2, 1, "actor", 3, {}, {}), StepFailed(2, 1, "actor", "of no use")):
        assert _lines(_course(*there, _planned(), ended))[0].startswith("waiting for groups for step")
    all_there = [TrajectoryOpened(f"w{at}", f"w{at}", f"h{at}", "t") for at in range(8)]
    finished = [TrajectoryFinished(f"w{at}", "completed") for at in range(8)]
    assert _lines(_course(*BEGUN, *all_there, *finished)) == [
        "waiting for the trainer to plan step 3 of 9: 8 groups are there (for 100 s, as long as it takes)"
    ]


def test_a_training_at_its_end() -> None:
    """After its last step, and rollouts that are to notice; rollouts alone are what there is to wait for."""
    last = [RunOpened("train", {"steps": 3, "steps_done": 2}), StepCommitted(2, 1, "actor", 3, {}, {})]
    assert _lines(_course(*last))[0].startswith("waiting for the trainer to end, after step 3 of 3")
    ended = replace(TRAINER, state="ended", since=190.0)
    assert _lines(_course(*last), parts=(ended, ROLLOUTS)) == [
        "waiting for the rollouts to end: 0 run, 0 ended (for 10 s, until 1970-01-01T00:04:10Z at most)"
    ]
    assert _lines(_course(*_evaluation()), parts=(ROLLOUTS,)) == [
        "waiting for the rollouts to end: 1 run, 2 ended (for 195 s, as long as it takes)"
    ]


def test_whom_admission_holds() -> None:
    """How many, and for which version."""
    lines = _lines(_course(*BEGUN, _planned(), StepCommitted(2, 1, "actor", 3, {}, {}), _planned()), held=12)
    assert lines[1:] == [
        "waiting for room for 12 new trajectories, which admission holds until the trainer has made version "
        "4 or a later one (for 98 s, as long as it takes)"
    ]
    begun_again = [
        RunOpened("train", {"steps": 9, "steps_done": 7}),
        SyncFinished("actor", 7, "s", "e", 1, 0.1),
    ]
    assert "has made version 8 or a later one" in _lines(_course(*begun_again), held=12)[-1]


@pytest.mark.parametrize("records", [BEGUN, [*BEGUN, *_evaluation()]])
def test_the_same_wait_has_the_same_key(records: list[Record]) -> None:
    """However much of it is there by now; another one has another."""
    more = [LaunchEnded("e2", "l2", "done"), TrajectoryOpened("x", "x", "g", "t")]
    waits: list[list[Awaited]] = [
        awaited(_course(*variant), [TRAINER], LIMITS, 0, 200.0)
        for variant in (
            records,
            [*records, *more],
            [*records, EvalFinished("actor", 3, "p", "", "", 0, 0, 0, 0, 0, {})],
        )
    ]
    assert waits[0][0].key == waits[1][0].key
    assert (waits[0][0].key == waits[2][0].key) == (len(records) == 1)


def _broken(silence: Silence, at: dict[int, list[Awaited]], until: int) -> list[tuple[int, str]]:
    """When something was said, and of what, while these waits are there from these times on."""
    lines, waits = list[tuple[int, str]](), list[Awaited]()
    for now in range(until):
        waits = at.get(now, waits)
        lines += [(now, wait.key) for wait in silence.due(waits, float(now))]
    return lines


def test_a_long_silence() -> None:
    """It is broken after 10 s, 30 s, a minute, and then each minute."""
    reads = Awaited("trainer", "it", 0.0, None)
    assert [now for now, _ in _broken(Silence(0.0), {0: [reads]}, 250)] == [10, 30, 60, 120, 180, 240]


def test_short_waits_one_after_the_other() -> None:
    """None takes 10 s, and no line tells of one that ends: the silence is broken all the same."""
    waits = {at: [Awaited(f"wait {at}", "it", float(at), None)] for at in range(0, 40, 6)}
    assert _broken(Silence(0.0), waits, 40) == [(10, "wait 6"), (30, "wait 30")]


def test_a_wait_among_other_lines() -> None:
    """It is said after 10 s and each minute, however much else is printed."""
    silence, wait, times = Silence(0.0), Awaited("evaluation", "it", 0.0, None), []
    for now in range(140):
        silence.hear(float(now))
        times += [now] if silence.due([wait], float(now)) else []
    assert times == [10, 70, 130]


def test_long_steps() -> None:
    """A healthy training, each of whose steps takes 40 s, is told of no more often than each minute."""
    silence, times = Silence(0.0), []
    for now in range(200):
        begun = float(now // 40 * 40)
        if now == begun:
            silence.hear(begun)
        times += [now] if silence.due([Awaited("step", "it", begun, None, work=True)], float(now)) else []
    assert times == [10, 70, 130, 190]
