"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import TORCH, WarmProcess
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.store import Store
from rollbook.store.errors import ShortageError
from rollbook.store.events import CheckpointWritten, PolicyPublished, StepCommitted, StepPlanned
from rollbook.train.checkpoints import shards
from rollbook.train.checkpoints.checkpoint import read_checkpoint

Stores = Callable[..., Store]
MEANWHILE = {"overlap": True}
BOTH = MEANWHILE | {"sharded": True}
WAYS = pytest.mark.parametrize("way", [MEANWHILE, BOTH], ids=["whole", "sharded"])


def _policy(log: Store) -> Path:
    return log.path / "checkpoints/demo/actor"


def _order(log: Store) -> list[str]:
    """Commits and checkpoints, in the order in which they became durable."""
    marks = {StepCommitted: "step", CheckpointWritten: "checkpoint", PolicyPublished: "published"}
    records = records_of(log, *marks)
    return [f"{marks[type(record)]} {record.policy_version}" for record in records]


@contextmanager
def _held(monkeypatch: pytest.MonkeyPatch, version: int, error: OSError | None = None) -> Iterator[Any]:
    """The write of a version's tensors waits until the event is set; then it goes on, or fails."""
    go, write = threading.Event(), os.write

    def held(fd: int, data: Any) -> int:
        if f"v{version:08d}" in os.readlink(f"/proc/self/fd/{fd}"):
            assert go.wait(60)
            if error is not None:
                raise error
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "write", held)
        yield go


def _after(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Have something done when the step on this version is about to run."""
    from rollbook.train.loop import trainer

    run = trainer.run_step

    def acting(policy: Any, settings: Any, *given: Any, **options: Any) -> Any:
        if settings.version == step:
            act()
        return run(policy, settings, *given, **options)

    monkeypatch.setattr(trainer, "run_step", acting)


@pytest.mark.more_but("whole")
@WAYS
def test_steps_are_taken_meanwhile(recorded: Stores, monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    """The checkpoint is recorded after it is durable, is of its own version, and the end is the same; the
    last one is waited for."""
    log, plain = recorded(), recorded("plain")
    fabric.train(plain, fabric.config(fabric.SFT, steps=4, checkpoint_every=2))
    with _held(monkeypatch, 2) as go:
        _after(monkeypatch, 3, go.set)
        fabric.train(log, fabric.config(fabric.SFT, steps=4, checkpoint_every=2, checkpoint=way))
    order = _order(log)
    assert order[:2] == ["checkpoint 0", "published 0"]
    assert order.index("step 3") < order.index("checkpoint 2") < order.index("checkpoint 4")
    assert order[-2:] == ["checkpoint 4", "published 4"]
    written, expected = records_of(log, CheckpointWritten), records_of(plain, CheckpointWritten)
    assert [replace(each, bytes=0) for each in written] == [replace(each, bytes=0) for each in expected]
    for first, second in zip(written, expected, strict=True):
        ours, theirs = (
            read_checkpoint(each.path / record.path) for each, record in ((log, first), (plain, second))
        )
        assert ours.weights.keys() == theirs.weights.keys()
        assert all((ours.weights[name] == tensor).all() for name, tensor in theirs.weights.items())


@pytest.mark.more_but("whole")
@WAYS
def test_one_is_written_at_a_time(recorded: Stores, monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    """The next one waits for the one before."""
    log = recorded()
    with _held(monkeypatch, 1) as go:
        timer = threading.Timer(1.5, go.set)
        _after(monkeypatch, 1, timer.start)
        fabric.train(log, fabric.config(fabric.SFT, steps=3, checkpoint_every=1, checkpoint=way))
    order = [mark for mark in _order(log) if not mark.startswith("published")]
    assert order.index("step 2") < order.index("checkpoint 1") < order.index("step 3")
    assert [mark for mark in order if "checkpoint" in mark] == [f"checkpoint {n}" for n in range(4)]


@pytest.mark.more_but("28-whole")
@WAYS
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(recorded: Stores, monkeypatch: pytest.MonkeyPatch, error: int, way: Any) -> None:
    """The training ends when it next looks, nothing is left, no step is lost, and it goes on."""
    log = recorded()
    settings = fabric.config(fabric.SFT, steps=8, checkpoint_every=4, checkpoint=way)
    with monkeypatch.context() as patch, _held(patch, 4, OSError(error, os.strerror(error))) as go:

        def fails() -> None:
            go.set()
            until = time.monotonic() + 60  # on a busy machine all steps might be over before it has failed
            while len(list(_policy(log).iterdir())) > 1:
                assert time.monotonic() < until
                time.sleep(0.01)

        _after(patch, 5, fails)
        message = rf"has no room for the checkpoint {_policy(log)}/v00000004 \("
        with pytest.raises(ShortageError, match=message):
            fabric.train(log, settings)
    assert [path.name for path in _policy(log).iterdir()] == ["v00000000"]
    assert [record.policy_version for record in records_of(log, CheckpointWritten)] == [0]
    assert len(records_of(log, StepCommitted)) in (6, 7), "it does not wait for the next checkpoint"
    fabric.train(log, settings)
    assert [s.policy_version for s in records_of(log, StepCommitted)] == [*range(1, 9)]
    assert {p.attempt for p in records_of(log, StepPlanned)} == {1}
    assert [record.policy_version for record in records_of(log, CheckpointWritten)] == [0, 8]


SLOW = """
import os, sys, time
from rollbook.cli.app import main
from rollbook.train.checkpoints import shards
write = os.write
def slow(fd, data):
    if "v00000002" in os.readlink(f"/proc/self/fd/{fd}"):
        time.sleep(SECONDS)
    return write(fd, data[:4096])
shards.os.write = slow
sys.exit(main())
"""
"""`rollbook` on a disk that takes long for version 2."""


def _start(log: Store, settings: Any, seconds: float) -> WarmProcess:
    file = log.path.parent / "slow.toml"
    file.write_text(fabric.toml(settings))
    words = ("-c", SLOW.replace("SECONDS", str(seconds)), "train", file, "--store", log.path)
    return WarmProcess(
        [sys.executable, *map(str, words)],
        modules=TORCH,
        env=os.environ | {"PYTHONPATH": str(fabric.ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _await(log: Store, version: int) -> None:
    """Wait until the step that makes a version is committed."""
    until = time.monotonic() + 90
    while not any(record.policy_version == version for record in records_of(log, StepCommitted)):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.more_but("sharded")
@WAYS
def test_a_kill_in_the_middle(recorded: Stores, way: Any) -> None:
    """The next start removes what it left, goes on from the checkpoint before, and ends the same."""
    log, plain = recorded(), recorded("plain")
    settings = fabric.config(fabric.SFT, steps=8, checkpoint_every=2, checkpoint=way)
    fabric.train(plain, settings)
    with _start(log, settings, 30.0) as process:
        _await(log, 3)
        process.kill()
    left = [path.name for path in _policy(log).iterdir() if path.name != "v00000000"]
    assert left == [f".v00000002.{process.pid}"]
    assert [each.policy_version for each in records_of(log, CheckpointWritten)] == [0]
    fabric.train(log, settings)
    assert not [path for path in _policy(log).iterdir() if path.name.startswith(".")]
    ends = [records_of(each, StepCommitted)[-1] for each in (log, plain)]
    assert ends[0].policy_version == 8
    assert ends[0].digests == ends[1].digests


def test_a_signal_waits_for_it(recorded: Stores) -> None:
    """SIGTERM ends the training once the one that is under way is recorded, and the last one too."""
    log = recorded()
    settings = fabric.config(fabric.SFT, steps=50, checkpoint_every=2, checkpoint=MEANWHILE)
    with _start(log, settings, 0.1) as process:
        _await(log, 2)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 128 + signal.SIGTERM
    last = records_of(log, StepCommitted)[-1].policy_version
    assert {0, 2, last} <= {record.policy_version for record in records_of(log, CheckpointWritten)}
    assert not [path for path in _policy(log).iterdir() if path.name.startswith(".")]
