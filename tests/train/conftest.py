"""Fixtures of the training tests; most of what they give is in `tests/fakes/stories/fabric.py`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric as made

from rollbook import store as rb
from rollbook.store import Store


@pytest.fixture(scope="session")
def fabric() -> Any:
    """The module that fabricates trajectories, models and stores."""
    return made


@pytest.fixture(scope="session")
def recorded_path(fabric: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded store on which nothing was trained. Copy it; never write."""
    path: Path = fabric.record_store(tmp_path_factory.mktemp("recorded") / "store").path
    return path


@pytest.fixture
def recorded(recorded_path: Path, tmp_path: Path) -> Callable[..., Store]:
    """Makes copies of the recorded store."""

    def make(name: str = "store") -> Store:
        return rb.open(shutil.copytree(recorded_path, tmp_path / name))

    return make


@pytest.fixture
def trained(fabric: Any, tmp_path: Path) -> Callable[..., Store]:
    """Makes copies of the trained store."""

    def make(name: str = "trained") -> Store:
        return rb.open(shutil.copytree(fabric.trained_path(), tmp_path / name))

    return make


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`rollbook ...` in this process: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from rollbook.cli.app import main

        monkeypatch.setattr(sys, "argv", ["rollbook", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run
