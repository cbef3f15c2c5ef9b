"""Idle models leave memory with their state, and come back with it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rollbook.service.idle import IdleStates
from rollbook.train.tenants.model import State

pytestmark = pytest.mark.torch


def _state(number: float) -> State:
    return State(
        {
            "adapter": {"a": torch.full((2, 3), number)},
            "optimizer": {"a.exp_avg": torch.full((6,), -number)},
            "gradients": {},
        }
    )


def test_the_oldest_go_to_the_disk_and_come_back(tmp_path: Path) -> None:
    """With the bits that they had; each is kept until it is taken, and no longer."""
    idle = IdleStates(tmp_path / "idle", 2)
    for number in range(4):
        idle.put(f"run-{number}", _state(number))
    assert sorted(path.name for path in (tmp_path / "idle").iterdir()) == ["run-0", "run-1"]
    for number in (1, 3, 0, 2):
        state = idle.take(f"run-{number}")
        assert state is not None
        assert state.digests() == _state(number).digests()
        assert idle.take(f"run-{number}") is None
    assert list((tmp_path / "idle").iterdir()) == []


def test_what_is_not_whole_is_made_again(tmp_path: Path) -> None:
    """It is told apart from a state; and what another process left is not read."""
    idle = IdleStates(tmp_path / "idle", 1)
    for number in range(3):
        idle.put(f"run-{number}", _state(number))
    (tmp_path / "idle" / "run-0" / "adapter.safetensors").write_bytes(b"x")
    other = _state(7)
    from safetensors.torch import save_file

    save_file(other.parts["adapter"], tmp_path / "idle" / "run-1" / "adapter.safetensors")
    assert idle.take("run-0") is None
    assert idle.take("run-1") is None
    assert IdleStates(tmp_path / "idle", 1).take("run-2") is None
    assert not (tmp_path / "idle").exists()
