"""A training of the tail whose run nobody records."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store.errors import ConfigError
from rollbook.train.loop.loop import _check_recorded


def test_a_mistyped_run_writes_nothing(tmp_path: Path) -> None:
    """The error has the near name and the remedy."""
    log = rb.open(tmp_path / "store", create=True)
    fabric.append(log, fabric.records("a", [fabric.T()]), run="math-1")
    before = log.head()
    with pytest.raises(ConfigError, match=r"run 'maht-1': .*did you mean math-1\?\): start `rollbook serve`"):
        fabric.train(log, fabric.config(fabric.GRPO, run="maht-1"), "tail")
    assert log.head() == before
    assert not (log.path / "checkpoints").exists()


def test_who_may_come_yet(tmp_path: Path) -> None:
    """A run that is recorded, one whose proxy waits for an engine, and the first of a store."""
    log = rb.open(tmp_path / "store", create=True)
    _check_recorded(log, "first")
    fabric.append(log, fabric.records("a", [fabric.T()]), run="math-1")
    _check_recorded(log, "math-1")
    with log.claim("recording run other", "wait"):
        _check_recorded(log, "other")
    with pytest.raises(ConfigError):
        _check_recorded(log, "other")
