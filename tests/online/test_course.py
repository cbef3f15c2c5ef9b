"""What is shown of a run while it goes on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rollbook.cli.online.run import lines_of
from rollbook.online.progress import KINDS, RunProgress
from rollbook.store.events import (
    EvalFinished,
    EvalStarted,
    Event,
    LaunchEnded,
    LaunchStarted,
    Record,
    RewardAssigned,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    TrajectoryFinished,
    TrajectoryOpened,
)


def course(*records: Record) -> RunProgress:
    """What these come to."""
    progress = RunProgress()
    progress.take(Event(record, "run") for record in records)
    return progress


def opened(name: str, group: str | None, split: str = "train") -> TrajectoryOpened:
    """A trajectory begins."""
    return TrajectoryOpened(name, name, group, None, split)


def planned(*trajectories: str) -> StepPlanned:
    """A step that uses one sample of each."""
    values: dict[str, Any] = {field.name: None for field in fields(StepPlanned)}
    samples = [{"trajectory_id": trajectory, "turn_id": f"turn-{trajectory}"} for trajectory in trajectories]
    return StepPlanned(**values | {"step": 0, "attempt": 1, "policy": "actor", "samples": samples})


def dropped(trajectory: str) -> SampleDropped:
    """A sample of it is not used."""
    values: dict[str, Any] = {field.name: None for field in fields(SampleDropped)}
    return SampleDropped(**values | {"trajectory_id": trajectory, "rule": "too_stale"})


def test_what_is_read_of_the_log() -> None:
    """What the screen shows, and nothing of checkpoints and retirements, which it does not."""
    assert {"step.committed", "eval.started", "launch.ended", "reward.assigned"} <= KINDS
    assert not {"checkpoint.written", "checkpoint.removed", "step.retired", "stop.fired"} & KINDS


def test_groups() -> None:
    """Running, waiting, used, dropped and void ones; evaluations are none."""
    began = [opened(f"{group}{i}", group) for group in "abc" for i in (1, 2)]
    ended = [TrajectoryFinished(name, "completed") for name in ("a1", "a2", "b1", "b2", "c1")]
    held = [opened("e1", "e", "eval"), TrajectoryFinished("e1", "completed")]
    progress = course(*began, *ended, *held)
    assert progress.groups == (1, 2)
    progress = course(*began, *ended, planned("a1", "a2"), StepCommitted(0, 1, "actor", 1, {}, {"loss": 0.5}))
    assert (progress.groups, progress.done, progress.version) == ((1, 1), 1, 1)
    progress.take([Event(TrajectoryFinished("c2", "void"), "run"), Event(dropped("b1"), "run")])
    progress.take([Event(dropped("b2"), "run")])
    assert progress.groups == (0, 1)


def test_the_lines() -> None:
    """The training, the rollouts by status, the groups, the rewards, the tokens and the evaluations."""
    place = {"epoch": 0, "task": "t", "sample": 0}
    started = [LaunchStarted("t", f"l{i}", "r", place, 1, "python", {}, "o", {}) for i in range(4)]
    records = [
        RunOpened("train", {"steps": 9, "steps_done": 2}),
        *started,
        *(LaunchEnded("t", f"l{i}", status) for i, status in enumerate(("done", "done", "timeout"))),
        *(opened("a", "g"), opened("e", "h", "eval"), TrajectoryFinished("a", "completed")),
        *(RewardAssigned("a", None, 1.0, "agent"), RewardAssigned("a", None, 9.0, "judge")),
        *(RewardAssigned("a", "turn", 9.0, "agent"), RewardAssigned("e", None, 9.0, "agent")),
        StepCommitted(2, 1, "actor", 3, {}, {"loss": 0.25, "reward": 0.5, "staleness_mean": 1.0}),
        EvalFinished("actor", 2, "p", "", "", 0, 0, 3, 2, 2, {"reward": 0.75, "success": None}, 8, False),
        EvalStarted("actor", 4, "p"),
    ]
    progress = course(*records)
    assert (progress.steps, progress.done) == (9, 3)
    assert dict(lines_of(progress, 12.3)) == {
        "training": "version 3  loss 0.2500  reward 0.500  staleness 1",
        "rollouts": "1 running, 2 done, 1 timeout",
        "groups": "0 running, 1 waiting to be trained on",
        "reward": "1.000 (the last 1)",
        "sampled": "12 tokens/s",
        "evaluated": "version 2  NOT WHOLE: 3 of 8 trajectories  reward 0.750",
        "evaluating": "version 4: none was launched yet",
    }
    assert dict(lines_of(RunProgress(), None)) == {
        "training": "version 0",
        "rollouts": "0 running",
        "groups": "0 running, 0 waiting to be trained on",
    }
