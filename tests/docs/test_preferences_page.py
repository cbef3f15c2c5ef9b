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
from rollbook.ingest.datasets.formats import converted
from rollbook.ingest.requests.fields import AddPreference
from rollbook.store import Store
from rollbook.testing.dialogues import write_model
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
    shown, trained = _block(page, "bash", 2).splitlines()
    runs = sorted({event.run for event in one_of_everything.events()})
    said = CliRunner().invoke(app, [*shlex.split(shown)[1:], "--run", runs[0]])
    assert said.exit_code == 0, said.output
    assert re.search(r"keeps \d+ samples of \d+ trajectories in \d+ pairs", said.output)
    assert shlex.split(trained)[1:3] == ["train", "dpo.toml"]


def test_what_it_imports(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the page, and the table's formats."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "my-model")
    (tmp_path / "pairs.jsonl").write_text(_block(page, "json"))
    said = CliRunner().invoke(app, shlex.split(_block(page, "bash", 1))[1:])
    assert said.exit_code == 0, said.output
    assert "imported 2 trajectories (2 turns), 1 preferences" in said.output.replace("\n", " ")
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    other = [chat[0], {"role": "assistant", "content": "5"}]
    values = {"messages": chat, "prompt": "2+2?", "completion": "4", "chosen": chat, "rejected": other}
    values |= {"label": True, "margin": 1, "score_chosen": 1, "score_rejected": 0}
    table = page[page.index("| a row has |") :].split("\n\n")[0].splitlines()[2:]
    for required, rest in (line.strip("|").split("|") for line in table):
        keys = re.findall(r"`(\w+)`", required)
        more = [key for key in re.findall(r"`(\w+)`", rest) if key in values]
        assert len(converted({key: values[key] for key in (*keys, *more)}).lines) == 1 + ("chosen" in keys)


def test_the_keys_are_keys(page: str) -> None:
    """And their values are taken."""
    for cell in re.findall(r"^\| (.*?) \|", page[page.index("| key |") :], re.MULTILINE)[2:]:
        for key, value in re.findall(r"`(\w+) = (\S+?)`", cell):
            Dpo.model_validate({"name": "dpo", key: json.loads(value)})
