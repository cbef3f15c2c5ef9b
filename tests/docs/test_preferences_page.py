"""docs/preferences.md: what it sends is taken, its configuration is one, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.ingest.requests.fields import AddPreference
from rollbook.store import Store
from rollbook.train.algorithms.preferences import Dpo
from rollbook.train.config.files import load_config


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "preferences.md").read_text()


def _block(page: str, kind: str, number: int = 0) -> str:
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[number]


def test_what_it_sends(page: str) -> None:
    """The body is one that the proxy takes."""
    words = shlex.split(_block(page, "bash").replace("\\\n", ""))
    assert words[2] == "localhost:8000/v1/preferences"
    said = AddPreference.model_validate(json.loads(words[words.index("-d") + 1]))
    assert (said.chosen, said.rejected, said.margin, said.source) == ("task-7-2", "task-7-0", 1.5, "reviewer")


def test_what_it_trains(
    page: str, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is read, and its pairs are shown."""
    (tmp_path / "dpo.toml").write_text(_block(page, "toml"))
    algorithm = load_config(tmp_path / "dpo.toml", []).algorithm
    assert isinstance(algorithm, Dpo)
    assert algorithm.demand.groups == 32
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    shown, trained = _block(page, "bash", 1).splitlines()
    runs = sorted({event.run for event in one_of_everything.events()})
    said = CliRunner().invoke(app, [*shlex.split(shown)[1:], "--run", runs[0]])
    assert said.exit_code == 0, said.output
    assert re.search(r"keeps \d+ samples of \d+ trajectories in \d+ pairs", said.output)
    assert shlex.split(trained)[1:3] == ["train", "dpo.toml"]


def test_the_keys_are_keys(page: str) -> None:
    """And their values are taken."""
    for cell in re.findall(r"^\| (.*?) \|", page[page.index("| key |") :], re.MULTILINE)[2:]:
        for key, value in re.findall(r"`(\w+) = (\S+?)`", cell):
            Dpo.model_validate({"name": "dpo", key: json.loads(value)})
