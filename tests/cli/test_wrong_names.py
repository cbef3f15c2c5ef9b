"""What is named and is not there is said to be not there, with what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Event
from rollbook.store.errors import CutError, ModelError
from rollbook.store.events import TrajectoryFinished, TrajectoryOpened
from rollbook.store.sql.views import VIEWS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a run `first`."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        records: list[Any] = [TrajectoryOpened("t", "t"), TrajectoryFinished("t")]
        writer.append([Event(record, "first") for record in records]).result(30)
    return log.path


def _failure(*words: object) -> BaseException | None:
    return CliRunner().invoke(app, [str(word) for word in words]).exception


def test_samples_of_a_run_that_is_not_there(path: Path) -> None:
    """The runs that there are are named; of one of them nothing is an error."""
    error = _failure("samples", "--store", path, "--run", "frist")
    assert isinstance(error, CutError)
    assert str(error) == "no run 'frist'; there are: first"
    assert CliRunner().invoke(app, ["samples", "--store", str(path), "--run", "first"]).exit_code == 0


@pytest.mark.parametrize("there", [False, True])
def test_a_model_that_is_no_folder(path: Path, tmp_path: Path, there: bool) -> None:
    """It is said of the folder itself, not of a file in it."""
    model = tmp_path / "model"
    if there:
        model.write_text("")
    what = "is no folder" if there else "is not there"
    config = tmp_path / "c.toml"
    config.write_text(f'run = "first"\nmodel = "{model}"\nsteps = 1\n[algorithm]\nname = "sft"\n')
    for words in (
        ["train", config, "--store", path],
        ["serve", "--store", path, "--model", model, "--port", 0, "--no-seal"],
    ):
        error = _failure(*words)
        assert isinstance(error, ModelError)
        assert str(error).startswith(f"the model {model} {what}: let ")


def test_the_help_of_sql_names_every_view() -> None:
    """As the views are, in whatever order."""
    said = CliRunner().invoke(app, ["sql", "--help"], env={"COLUMNS": "200"}).output
    listed = said.split("Views:")[1].split("Their columns")[0]
    assert set(re.findall(r"\w+", listed)) == {view.name for view in VIEWS}
