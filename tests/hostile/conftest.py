"""Fixtures of the hostile tests: models, and proxies with honest agents at work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.bench.hostile.stage import Stage
from rollbook.bench.scripted.dialogues import write_model


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights."""
    folder = tmp_path_factory.mktemp("text") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny Qwen3, weights and all."""
    from rollbook.demo.model import make_model

    folder = tmp_path_factory.mktemp("whole") / "model"
    make_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Where proxies are started."""
    with Stage(tmp_path_factory.mktemp("stage")) as started:
        yield started
