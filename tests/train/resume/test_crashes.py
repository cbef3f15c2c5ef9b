"""Training that is interrupted: a restart ends with exactly the weights of a run that never was."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import trainer_records

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import ModelError, TrainError
from rollbook.store.events import (
    CheckpointWritten,
    RewardAssigned,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
)
from rollbook.train.loop.trainer import Trainer
from rollbook.train.publish.publish import Publisher

Stores = Callable[..., Store]


def _final(log: Store, run: str = "demo") -> tuple[int, str, str]:
    """The last committed step's version, weights digest and optimizer digest."""
    last = [e.record for e in log.events() if isinstance(e.record, StepCommitted) and e.run == run][-1]
    return last.policy_version, last.digests["weights"], last.digests["optimizer"]


class Killed(BaseException):
    """Stands for kill -9: nothing may be written on the way out."""


def _crash(monkeypatch: pytest.MonkeyPatch, place: str, step: int) -> None:
    """Have the trainer die at a place of a step, leaving what a kill would leave."""
    write, publish, note = Trainer.write, Trainer.publish, Publisher.write

    def dying_write(self: Trainer, *records: Any) -> None:
        at = getattr(self, "step", None) == step
        if at and place == "before plan" and isinstance(records[-1], StepPlanned):
            raise Killed
        if at and place == "after plan" and isinstance(records[-1], StepCommitted):
            raise Killed
        write(self, *records)

    def dying_note(self: Publisher, *records: Any) -> None:
        note(self, *records)
        written = isinstance(records[0], CheckpointWritten) and records[0].policy_version == step
        if place == "after checkpoint" and written:
            raise Killed

    def dying_publish(self: Trainer) -> None:
        if place == "after commit" and self.step == step:
            raise Killed
        publish(self)

    monkeypatch.setattr(Publisher, "write", dying_note)
    monkeypatch.setattr(Trainer, "write", dying_write)
    monkeypatch.setattr(Trainer, "publish", dying_publish)


def _train_through_crashes(log: Store, settings: Any, crashes: list[tuple[str, int]], **options: Any) -> None:
    """Train, die at each place in turn, and train to the end."""
    for place, step in crashes:
        with pytest.MonkeyPatch.context() as patch:
            _crash(patch, place, step)
            with pytest.raises(Killed):
                fabric.train(log, settings, **options)
    fabric.train(log, settings, **options)


@pytest.mark.crashes
@pytest.mark.parametrize(
    "crashes",
    [
        [("before plan", 0)],
        [("after plan", 0)],
        [("after plan", 5), ("after plan", 5)],
        [("after commit", 4)],
        [("after checkpoint", 4), ("after commit", 7)],
        [("after commit", 9)],
    ],
    ids=lambda crashes: ", ".join(f"{p} {s}" for p, s in crashes),
)
def test_a_crash_changes_no_bit(recorded: Stores, trained: Stores, crashes: list[tuple[str, int]]) -> None:
    """Wherever it dies, a restart ends with the weights and optimizer of a run that never did."""
    log, whole = recorded(), trained()
    _train_through_crashes(log, fabric.config(fabric.SFT), crashes)
    steps, expected = trainer_records(log, StepCommitted), trainer_records(whole, StepCommitted)[:9]
    assert [s.policy_version for s in steps] == list(range(1, 10))
    assert [s.digests for s in steps] == [s.digests for s in expected]
    used = Counter(ref["turn_id"] for s in fabric.steps_of(log).steps.values() for ref in s.planned.samples)
    assert used == {f"teach{i}.1": 3 for i in range(18)}
    assert trainer_records(log, CheckpointWritten)[-1].policy_version == 9, "the end has its checkpoint"
    lost = Counter(step for place, step in crashes if place == "after plan")
    attempts = {p.step: p.attempt for p in trainer_records(log, StepPlanned)}
    assert attempts == {n: 1 + lost[n] for n in range(9)}


def test_the_next_phase_follows_a_crash_at_the_end(recorded: Stores, trained: Stores) -> None:
    """Dying between the last commit and its checkpoint, then restarting, leaves a phase to build on."""
    log = recorded()
    _train_through_crashes(log, fabric.config(fabric.SFT), [("after commit", 9)])
    fabric.train(log, fabric.config(fabric.GRPO))
    assert _final(log) == _final(trained())


@pytest.mark.more
@pytest.mark.parametrize("place", ["after plan", "after commit"])
def test_dropped_groups_are_dropped_again(recorded: Stores, place: str) -> None:
    """Flat groups keep their turn in the step when it is planned again, so the batches are the same."""
    logs = [recorded(name) for name in ("whole", "crashed")]
    settings = fabric.config(fabric.GRPO, steps=2, algorithm={"name": "grpo", "groups": 3, "group_size": 4})
    flat = [RewardAssigned(f"g{g}.{i}", None, 1.0) for g in (1, 4) for i in range(4)]
    for log in logs:
        fabric.append(log, flat)
    fabric.train(logs[0], settings)
    _train_through_crashes(logs[1], settings, [(place, 1)])
    whole, crashed = ([s.planned.samples for s in fabric.steps_of(log).steps.values()] for log in logs)
    assert whole == crashed
    assert _final(logs[0]) == _final(logs[1])
    drops = [(d.trajectory_id.split(".")[0], d.rule, d.step) for d in trainer_records(logs[0], SampleDropped)]
    assert Counter(drops) == {("g1", "zero_variance", 0): 6, ("g4", "zero_variance", 1): 6}


def test_online_and_offline_take_the_same_steps(recorded: Stores) -> None:
    """From the tail of the same log, restarts included, GRPO makes the weights it makes at a cut."""
    logs = [recorded(name) for name in ("cut", "tail")]
    settings = fabric.config(fabric.GRPO)
    fabric.train(logs[0], settings)
    _train_through_crashes(logs[1], settings, [("after plan", 0), ("after commit", 2)], source="tail")
    assert [s.digests["weights"] for s in trainer_records(logs[0], StepCommitted)] == [
        s.digests["weights"] for s in trainer_records(logs[1], StepCommitted)
    ]


def test_an_error_in_a_step_is_recorded(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises is a step.failed of its attempt; the restart plans attempt 2."""
    log = recorded()

    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("rollbook.train.loop.trainer.run_step", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            fabric.train(log, fabric.config(fabric.SFT, steps=1))
    assert trainer_records(log, StepFailed) == [StepFailed(0, 1, "actor", "RuntimeError('no memory')")]
    fabric.train(log, fabric.config(fabric.SFT, steps=1))
    assert [(p.step, p.attempt) for p in trainer_records(log, StepPlanned)] == [(0, 1), (0, 2)]
    assert [(s.step, s.attempt) for s in trainer_records(log, StepCommitted)] == [(0, 2)]


def test_resuming_elsewhere_is_refused(recorded: Stores) -> None:
    """When steps after the checkpoint come out with other bits, resuming is an error that names the stage."""
    log = recorded()
    settings = fabric.config(fabric.SFT)
    with pytest.MonkeyPatch.context() as patch:
        _crash(patch, "after plan", 3)
        with pytest.raises(Killed):
            fabric.train(log, settings)
    with pytest.MonkeyPatch.context() as patch:
        run_step = sys.modules["rollbook.train.resume.restore"].run_step

        def noisy(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
            for micro in batch.micro_batches:
                micro.temperatures[:] *= 1.001
            return run_step(policy, settings, batch, **options)

        patch.setattr("rollbook.train.resume.restore.run_step", noisy)
        with pytest.raises(TrainError, match="running step 0 again differs in logprobs"):
            fabric.train(log, settings)
    fabric.train(log, settings)
    assert _final(log)[0] == 9


def test_another_checkpoint_is_not_gone_on_from(
    recorded: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is whole, but not the one the log names, is passed over; without another it is an error."""
    log, other = recorded("store"), recorded("other")
    for held, seed in ((log, 3), (other, 9)):
        fabric.train(held, fabric.config(fabric.SFT, steps=4, seed=seed))
    plain = rb.open(shutil.copytree(log.path, tmp_path / "plain"))
    others = other.path / "checkpoints/demo/actor/v00000004"
    for name in ("v00000004", "v00000000"):
        ours = log.path / "checkpoints/demo/actor" / name
        saved = {file.name: file.read_bytes() for file in ours.iterdir()}
        for file in others.iterdir():
            (ours / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"(?s)version 4: .*version 0: .*not those the log names"):
        fabric.train(log, fabric.config(fabric.SFT))
    for name, data in saved.items():
        (ours / name).write_bytes(data)
    fabric.train(log, fabric.config(fabric.SFT))
    err = capsys.readouterr().err
    assert "not those the log names. Going on from version 0 instead: 4 steps since are run" in err
    fabric.train(plain, fabric.config(fabric.SFT))
    assert _final(log) == _final(plain)


def _kill_after(process: Any, log: Store, events: int) -> None:
    """kill -9 once the train lane holds so many events."""
    deadline = time.monotonic() + 100
    while log.head().get("train", 0) < events:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.crashes
def test_kill_9_and_restart(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """`rollbook train` killed in mid-run goes on when it is run again, to exactly the same weights."""
    settings = fabric.config(fabric.SFT, steps=60, checkpoint_every=7)
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    logs = [recorded(name) for name in ("killed", "whole")]
    command = ("train", tmp_path / "train.toml", "--store", logs[0].path)
    with fabric.start_cli(*command) as process:
        _kill_after(process, logs[0], 25)
    reached = fabric.steps_of(logs[0]).next_step
    assert 0 < reached < 60, "it was to be killed in mid-run"
    code, _, err = cli(*command)
    assert code == 0, err
    assert f"going on after {reached} of 60 steps" in err
    fabric.train(logs[1], settings)
    assert _final(logs[0]) == _final(logs[1])
    histories = [fabric.steps_of(log) for log in logs]
    for history in histories:
        used = Counter(ref["turn_id"] for s in history.steps.values() for ref in s.planned.samples)
        assert used == {f"teach{i}.1": 20 for i in range(18)}
        assert [s.committed.policy_version for _, s in sorted(history.steps.items())] == list(range(1, 61))
    assert set(histories[0].attempts.values()) <= {1, 2}
    assert set(histories[1].attempts.values()) == {1}
