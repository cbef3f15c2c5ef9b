"""What is named and is not there is said to be not there, with what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import WarmProcess
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Event
from rollbook.store.errors import ConfigError, CutError, ModelError
from rollbook.store.events import RunOpened, TrajectoryFinished, TrajectoryOpened
from rollbook.store.sql.views import VIEWS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a run `first`, which has a trajectory, and a run `another`, which has none."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        records: list[Any] = [TrajectoryOpened("t", "t"), TrajectoryFinished("t")]
        writer.append([Event(record, "first") for record in records]).result(30)
        writer.append([Event(RunOpened("serve", {}), "another")]).result(30)
    return log.path


def _failure(*words: object) -> BaseException | None:
    return CliRunner().invoke(app, [str(word) for word in words]).exception


@pytest.mark.parametrize(
    "words",
    [
        ["samples"],
        ["samples", "--as-of", "step:3"],
        ["show", "t"],
        ["ledger"],
        ["tail", "--no-follow"],
        ["replay", "step", "3"],
        ["export", "--to", "out", "--format", "jsonl"],
        ["sql", "select 1", "--as-of", "step:3"],
        ["store", "secrets", "--as-of", "step:3"],
        ["store", "erase", "--trajectory", "t", "--reason", "asked"],
        ["store", "retire", "--steps", "3", "--reason", "asked"],
    ],
    ids=" ".join,
)
def test_an_unknown_run_is_an_error(path: Path, words: list[str]) -> None:
    """The error for an unknown run names the existing runs, the nearest first."""
    error = _failure(*words, "--store", path, "--run", "frist")
    assert isinstance(error, CutError)
    assert str(error) == "no run 'frist'; there are: first, another"


def test_a_known_run_is_accepted(path: Path) -> None:
    """With a run that exists, commands work or report the missing trajectory."""
    for words in (["samples"], ["show", "t"], ["tail", "--no-follow"]):
        assert CliRunner().invoke(app, [*words, "--store", str(path), "--run", "first"]).exit_code == 0
    error = _failure("show", "nobody", "--store", path, "--run", "first")
    assert str(error).startswith("no trajectory 'nobody' in run 'first' among 1")
    error = _failure("show", "t", "--store", path, "--run", "another")
    assert str(error) == "no trajectory 't' in run 'another'; there is one in first"


def test_following_may_wait_for_a_run_that_does_not_exist_yet(path: Path) -> None:
    """It is said that the run is not there yet, and its events are printed once they are."""
    words = [sys.executable, "-m", "rollbook", "tail", "--store", path, "--run", "frist", "--events"]
    process = WarmProcess(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert "no run 'frist'; there are: first, another; waiting for it" in process.stderr.readline()
        with rb.open(path).writer("serve") as writer:
            writer.append([Event(TrajectoryOpened("u", "late"), "frist")]).result(30)
        assert "late" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_of_many_runs_the_nearest_are_named(tmp_path: Path) -> None:
    """Of very many the nearest are named, and how many others there are."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        for n in range(30):
            writer.append([Event(TrajectoryOpened(f"t{n}", "t"), f"run-{n:02}")]).result(30)
    error = str(_failure("samples", "--store", log.path, "--run", "run-7"))
    assert error.startswith("no run 'run-7'; there are: run-07, run-17, run-27, run-00,")
    assert error.endswith(" and 10 more")


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
    output = CliRunner().invoke(app, ["sql", "--help"], env={"COLUMNS": "200"}).output
    listed = output.split("Views:")[1].split("Their columns")[0]
    assert set(re.findall(r"\w+", listed)) == {view.name for view in VIEWS}


def test_a_benchmark_of_a_checkout() -> None:
    """Says how it is run there."""
    failure = _failure("bench", "proxy")
    assert isinstance(failure, ConfigError)
    assert str(failure).endswith("run in a checkout of Rollbook: python -m bench proxy")
