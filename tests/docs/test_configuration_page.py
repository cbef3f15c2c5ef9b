"""docs/configuration.md says what a CONFIG may hold; `--show-config` says what one holds."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from page_configuration import render
from typer.testing import CliRunner

from rollbook import store
from rollbook.cli.app import app
from rollbook.store import Event
from rollbook.store.config import described
from rollbook.store.events import LabelAdded
from rollbook.train.config.config import TABLES, TrainConfig, parse_config
from rollbook.train.config.files import as_toml, load_config

MODELS = [model for kinds in TABLES.values() for model in kinds.values()]


@pytest.fixture(scope="module")
def rendered() -> str:
    """The page that today's settings make."""
    return render()


def test_the_page_is_the_rendered_one(root: Path, rendered: str) -> None:
    """It is generated, never edited."""
    page = (root / "docs" / "configuration.md").read_text()
    command = "python docs/render/page_configuration.py > docs/configuration.md"
    assert page == rendered, f"docs/configuration.md is old: run {command}"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_is_there_with_its_meaning(model: type[Any], rendered: str) -> None:
    """Of every table; what a key means is said beside it, in the code too."""
    texts = described(model)
    assert list(texts) == list(model.model_fields)
    for name, text in texts.items():
        if name not in TABLES:
            meaning = " ".join(text.split())
            assert any(line.startswith(f"| `{name}` |") and meaning in line for line in rendered.splitlines())


def test_every_table_is_known() -> None:
    """The tables of the page and of error messages are those of the settings."""
    named = {
        name
        for name, described in TrainConfig.model_json_schema()["properties"].items()
        if "$ref" in str(described)
    }
    assert named == set(TABLES) - {""}


@pytest.mark.parametrize("file", ["sft.toml", "grpo.toml"])
def test_show_config_prints_an_equal_configuration(root: Path, tmp_path: Path, file: str) -> None:
    """`--show-config` prints a configuration equal to the one it was given, and trains nothing."""
    path, nowhere = root / "configs" / file, tmp_path / "none"
    words = ["train", str(path), "--set", "optimizer.lr=0.5", "--show-config"]
    result = CliRunner().invoke(app, words, env={"ROLLBOOK_STORE": str(nowhere)})
    assert result.exit_code == 0, result.output
    (tmp_path / "shown.toml").write_text(result.stdout)
    assert load_config(tmp_path / "shown.toml", []) == load_config(path, ["optimizer.lr=0.5"])
    shown = tomllib.loads(result.stdout)
    assert (shown["optimizer"]["lr"], shown["optimizer"]["eps"]) == (0.5, 1e-8)
    assert "# decay_steps: not set" in result.stdout
    assert not nowhere.exists()


def test_several_rules_are_shown() -> None:
    """Each as a table of its own, which reads as the same rule."""
    rules = [{"metric": "entropy", "below": 0.1}, {"metric": "evaluation.loss", "better": "lower"}]
    values = {
        "model": "m",
        "steps": 2,
        "algorithm": {"name": "sft"},
        "evaluation": {"every": 7},
        "stop": rules,
    }
    config = parse_config(values, "given")
    assert parse_config(tomllib.loads(as_toml(config)), "shown") == config
    assert as_toml(config).count("[[stop]]") == 2


def test_a_store_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """ROLLBOOK_STORE serves where --store is not given, which overrules it."""
    for name in ("one", "other"):
        with store.open(tmp_path / name, create=True).writer("serve") as writer:
            writer.append([Event(LabelAdded("t", None, name, True, "test"), name)]).result(20)
    environment, query = {"ROLLBOOK_STORE": str(tmp_path / "one")}, "select run from events"
    here = CliRunner().invoke(app, ["sql", query, "--format", "json"], env=environment)
    there = CliRunner().invoke(
        app, ["sql", query, "--format", "json", "--store", str(tmp_path / "other")], env=environment
    )
    assert ([row["run"] for row in json.loads(here.stdout)], here.exit_code) == (["one"], 0)
    assert [row["run"] for row in json.loads(there.stdout)] == ["other"]
    tail = CliRunner().invoke(app, ["tail", "--no-follow", "--json"], env=environment)
    assert [json.loads(line)["run"] for line in tail.stdout.splitlines()] == ["one"]
