"""Checkpoints that are not finished leave nothing: a full disk, a crash, a damaged one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.store import Store
from rollbook.store.errors import ShortageError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned
from rollbook.train.checkpoints import checkpoint, shards
from rollbook.train.checkpoints.directory import building_beside, remove_left_over

Stores = Callable[..., Store]


def _dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def _policy(log: Store) -> Path:
    return log.path / "checkpoints/demo/actor"


# Left over ----------------------------------------------------------------------------------------


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Not what a living process builds, what somebody has locked, nor what has another name."""
    dead, locked = _dead(), tmp_path / f".v00000002.{_dead()}"
    left = [tmp_path / f".v00000001.{dead}", tmp_path / f".v00000003-0123abcd.{dead}"]
    kept = [locked, tmp_path / f".v00000001.{os.getppid()}", tmp_path / "v00000004", tmp_path / ".v5"]
    for folder in [*left, *kept]:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    fd = os.open(locked, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert sorted(remove_left_over(tmp_path)) == sorted(left)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    os.close(fd)
    assert remove_left_over(tmp_path) == [locked]
    assert remove_left_over(tmp_path / "none") == []


def test_the_next_start_removes_it(recorded: Stores) -> None:
    """`rollbook train` looks in its own policy's folder."""
    log = recorded()
    left = _policy(log) / f".v00000001.{_dead()}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))
    fabric.train(log, fabric.config(fabric.SFT, steps=1))
    assert sorted(path.name for path in _policy(log).iterdir()) == ["v00000000", "v00000001"]


def test_it_is_locked_while_it_is_built(tmp_path: Path) -> None:
    """So that nobody takes it for left over, whatever processes he can see."""
    with building_beside(tmp_path / "v00000001") as building:
        other = os.open(building, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    with pytest.raises(ZeroDivisionError), building_beside(tmp_path / "v00000002"):
        _ = 1 / 0
    assert [path.name for path in tmp_path.iterdir()] == [building.name]


# A full disk --------------------------------------------------------------------------------------


@pytest.mark.more_but("28")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_a_checkpoint(
    recorded: Stores,
    cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:
    """The error names disk and folder, nothing is left of it, the step stays, and the next start goes on."""
    log, write = recorded(), os.write

    def full(fd: int, data: Any) -> int:
        if "v00000002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(error, os.strerror(error))
        return write(fd, data)

    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=4, checkpoint_every=2)))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "write", full)
        code, _, err = cli(*command)
    assert code == 2
    assert f"has no room for the checkpoint {_policy(log)}/v00000002 (" in err
    assert "the disk at /" in err
    assert [path.name for path in _policy(log).iterdir()] == ["v00000000"]
    assert [s.policy_version for s in records_of(log, StepCommitted)] == [1, 2]
    assert cli(*command)[0] == 0
    assert [s.policy_version for s in records_of(log, StepCommitted)] == [1, 2, 3, 4]
    assert {p.attempt for p in records_of(log, StepPlanned)} == {1}


def test_another_error_is_what_it_was(tmp_path: Path) -> None:
    """Only a full disk is told as one."""
    with pytest.raises(OSError, match="broken") as raised, building_beside(tmp_path / "v00000001"):
        raise OSError(errno.EIO, "broken")
    assert not isinstance(raised.value, ShortageError)
    assert list(tmp_path.iterdir()) == []


# Damage -------------------------------------------------------------------------------------------


def _spoil(log: Store, version: int) -> None:
    """Change a byte of the weights."""
    file = _policy(log) / f"v{version:08d}" / checkpoint.WEIGHTS
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The steps since the one before are run again, and it ends as if nothing had happened."""
    log, plain = recorded(), recorded("plain")
    for held in (log, plain):
        fabric.train(held, fabric.config(fabric.SFT, steps=8))
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT)))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    _spoil(log, 8)
    code, _, err = cli(*command, "--set", "steps=8")
    assert code == 0, err
    assert "the checkpoint of version 8: " in err
    assert "weights damaged: model." in err
    assert "Going on from version 4 instead: 4 steps since are run again" in err
    assert [c.policy_version for c in records_of(log, CheckpointWritten)] == [0, 4, 8, 8], "it is there again"
    code, _, err = cli(*command)
    assert (code, "damaged" in err) == (0, False)
    fabric.train(plain, fabric.config(fabric.SFT))
    assert records_of(log, StepCommitted)[-1].digests == records_of(plain, StepCommitted)[-1].digests


def test_all_are_damaged(recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """An error that says so of each."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=4))
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT)))
    _spoil(log, 4)
    _spoil(log, 0)
    code, _, err = cli("train", tmp_path / "train.toml", "--store", log.path)
    assert code == 2
    assert "no checkpoint that run 'demo' could go on from is whole: restore one from a copy" in err
    assert "version 4: " in err
    assert "version 0: " in err
