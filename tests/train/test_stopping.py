"""SIGINT and SIGTERM: the current step is finished, a checkpoint is written, and training goes on from it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import trainer_records

from rollbook.store import Store
from rollbook.store.events import CheckpointWritten, StepCommitted, StepFailed, StepPlanned
from rollbook.train.loop.trainer import Trainer
from rollbook.train.sources import queue_source
from rollbook.train.stopping import Stopped, Stopping

Stores = Callable[..., Store]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Interrupts are heard, as at a terminal: a worker of the tests ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _weights(log: Store) -> list[str]:
    """What each step made, in order."""
    return [step.digests["weights"] for step in trainer_records(log, StepCommitted)]


def _interrupt(monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> None:
    """A signal comes in the middle of a step, once."""
    write, sent = Trainer.write, []

    def interrupted(self: Trainer, *records: Any) -> None:
        write(self, *records)
        if isinstance(records[-1], StepPlanned) and self.step == step and not sent:
            sent.append(number)
            signal.raise_signal(number)

    monkeypatch.setattr(Trainer, "write", interrupted)


def _train_until_interrupted(log: Store) -> None:
    """Supervised training that is interrupted in its sixth step."""
    with pytest.MonkeyPatch.context() as patch:
        _interrupt(patch, signal.SIGINT, 5)
        with pytest.raises(KeyboardInterrupt):
            fabric.train(log, fabric.config(fabric.SFT))


@pytest.mark.more_but("SIGTERM")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_command_ends_in_order(recorded: Stores, tmp_path: Path, name: str) -> None:
    """It says how far it came, has a checkpoint of that, and exits as the signal wants."""
    settings = fabric.config(fabric.SFT, steps=60, checkpoint_every=1000)
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    log = recorded()
    with fabric.start_cli("train", tmp_path / "train.toml", "--store", log.path) as process:
        deadline = time.monotonic() + 100
        while log.head().get("train", 0) < 15:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate()
    assert process.returncode == 128 + getattr(signal, name)
    reached = len(_weights(log))
    assert 0 < reached < 60
    assert f"stopped after {reached} of 60 steps: the same command goes on" in err
    assert [c.policy_version for c in trainer_records(log, CheckpointWritten)] == [0, reached]
    assert trainer_records(log, StepFailed) == []


def test_a_signal_in_the_middle_of_a_step(
    recorded: Stores, trained: Stores, capfd: pytest.CaptureFixture[str]
) -> None:
    """That step is committed, none after it is planned, and the rest gives the weights of a whole run."""
    log = recorded()
    _train_until_interrupted(log)
    assert [plan.step for plan in trainer_records(log, StepPlanned)] == list(range(6))
    assert trainer_records(log, CheckpointWritten)[-1].policy_version == 6
    assert "SIGINT: finishing the current step; repeat the signal to end now" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fabric.train(log, fabric.config(fabric.SFT))
    assert [(plan.step, plan.attempt) for plan in trainer_records(log, StepPlanned)] == [
        (n, 1) for n in range(9)
    ]
    assert _weights(log) == _weights(trained())[:9]


def test_another_learning_rate_after_it(recorded: Stores) -> None:
    """Another configuration begins where the interrupted one stopped, between two of its checkpoints."""
    log = recorded()
    _train_until_interrupted(log)
    fabric.train(log, fabric.config(fabric.SFT, steps=2, optimizer={"lr": 1e-4}))
    plans = trainer_records(log, StepPlanned)[6:]
    assert [(plan.step, plan.policy_version) for plan in plans] == [(6, 6), (7, 7)]
    assert {plan.optimizer["lr"] for plan in plans} == {1e-4}


def test_a_signal_while_samples_are_waited_for(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends at once, and what was learned so far has its checkpoint."""
    log = recorded()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(queue_source, "time", clock)
    settings = fabric.config(fabric.GRPO, steps=50, checkpoint_every=1000)
    with pytest.raises(KeyboardInterrupt):
        fabric.train(log, settings, source="tail")
    reached = len(_weights(log))
    assert reached == 3, "six groups, of which a step takes two"
    assert [c.policy_version for c in trainer_records(log, CheckpointWritten)] == [0, reached]


def test_a_second_signal_ends_it_now(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current step fails on the signal, and the training does not wait for a checkpoint."""
    log = recorded()
    _interrupt(monkeypatch, signal.SIGINT, 5)
    run = Trainer.write

    def twice(self: Trainer, *records: Any) -> None:
        run(self, *records)
        if isinstance(records[-1], StepCommitted) and self.step == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "write", twice)
    with pytest.raises(KeyboardInterrupt):
        fabric.train(log, fabric.config(fabric.SFT))
    assert trainer_records(log, CheckpointWritten)[-1].policy_version == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# The parts -----------------------------------------------------------------------------------------


def test_what_is_in_hand_while_one_waits_is_not_cut_off() -> None:
    """A sync to an engine that came back goes to its end; then the wait is over."""
    done: list[str] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("whole")

    with Stopping() as stopping, contextlib.suppress(Stopped), stopping.waiting():
        stopping.in_hand(work)()
        done.append("waited on")
    assert done == ["whole"]
    assert stopping.number == signal.SIGINT


def test_a_wait_does_not_begin_after_a_signal() -> None:
    """Nor is anything cut off outside of waits."""
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stopping.waiting():
            raise AssertionError


def test_without_a_signal_nothing_happens() -> None:
    """The handlers are as they were, and the end is none."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stopping() as stopping, stopping.waiting():
        assert stopping.in_hand(lambda: 5)() == 5
    stopping.end()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
