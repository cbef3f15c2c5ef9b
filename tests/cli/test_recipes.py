"""`rollbook samples --recipe` and `rollbook recipe diff`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Store


@pytest.fixture
def log(tmp_path: Path) -> Store:
    """Two groups of two trajectories with rewards 0 and 1, of versions 0 and 3."""
    log = rb.open(tmp_path / "store", create=True)
    records: list[Any] = []
    for group, version in (("old", 0), ("new", 3)):
        for i in range(2):
            turns = [fabric.T([5, 6], [20, 21], version=version)]
            records += fabric.records(f"{group}{i}", turns, group=group, reward=float(i))
    fabric.append(log, records)
    return log


def _file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def _run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_what_a_recipe_keeps(log: Store, tmp_path: Path) -> None:
    """The counts, the rule with its first sample, and the kept ones; as JSON all of it."""
    recipe = _file(tmp_path, "r.toml", "min_reward = 0.5\n")
    code, out = _run("samples", "--recipe", recipe, "--store", log.path)
    assert code == 0
    assert "keeps 2 samples of 2 trajectories in 2 groups, 4 trained tokens" in out
    assert "min_reward        2  new0: reward 0.0, min_reward 0.5" in out
    code, out = _run("samples", "--recipe", recipe, "--store", log.path, "--json")
    report = json.loads(out)
    assert [sample["trajectory"] for sample in report["kept"]] == ["new1", "old1"]
    assert [(sample["turn_id"], sample["rule"]) for sample in report["dropped"]] == [
        ("new0.0", "min_reward"),
        ("old0.0", "min_reward"),
    ]
    assert (report["run"], report["policy_version"]) == (fabric.RUN, 0)


def test_how_two_recipes_differ(log: Store, tmp_path: Path) -> None:
    """Each sample that one keeps alone, with the rule by which the other drops it."""
    a = _file(tmp_path, "a.toml", "min_reward = 0.5\n")
    b = _file(tmp_path, "b.toml", 'where = "max_version = 3"\n')
    code, out = _run("recipe", "diff", a, b, "--store", log.path, "--json")
    assert code == 0
    report = json.loads(out)
    assert [sample["turn_id"] for sample in report["both"]] == ["new1.0"]
    assert [(sample["turn_id"], sample["rule"]) for sample in report["only_a"]] == [("old1.0", "not_chosen")]
    assert [(sample["turn_id"], sample["rule"]) for sample in report["only_b"]] == [("new0.0", "min_reward")]
    code, out = _run("recipe", "diff", a, b, "--store", log.path)
    assert code == 0
    assert "not_chosen (1)" in out
    assert "min_reward (1)" in out


def test_a_config_names_a_recipe_file(log: Store, tmp_path: Path) -> None:
    """Looked for beside it; its algorithm's needs count too."""
    _file(tmp_path, "r.toml", "drop_zero_variance = false\nmin_reward = 0.5\n")
    config = _file(
        tmp_path,
        "c.toml",
        f'run = "{fabric.RUN}"\nmodel = "m"\nsteps = 1\nrecipe = "r.toml"\n[algorithm]\nname = "grpo"\n',
    )
    code, out = _run("samples", "--recipe", config, "--store", log.path)
    assert code == 0
    assert "keeps 2 samples" in out
    code, out = _run("train", config, "--store", log.path, "--show-config")
    assert "min_reward = 0.5" in out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("min_rewart = 1\n", "min_rewart: unknown key"),
        ("top_fraction = 2.0\n", "top_fraction: "),
        ('where = "no_such > 1"\n', "recipe.where 'no_such > 1'"),
        ("= 1\n", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(log: Store, tmp_path: Path, text: str, reason: str) -> None:
    """The file, the key and what is wrong with it."""
    code, _ = _run("samples", "--recipe", _file(tmp_path, "r.toml", text), "--store", log.path)
    assert code != 0
    from rollbook.cli.samples import print_recipe
    from rollbook.store.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        print_recipe(log.path, tmp_path / "r.toml", "head", None, as_json=False)
    assert reason in str(refused.value)


def test_a_config_is_held_against_its_model(log: Store, tmp_path: Path) -> None:
    """Ids beyond the vocabulary and paths beyond the context are dropped by their rules; a model that cannot
    be read is named, and nothing is held against it."""
    fabric.append(log, fabric.records("odd", [fabric.T([5], [10**6], version=0)], group="odd", reward=1.0))
    fabric.append(log, fabric.records("long", [fabric.T([5], [6] * 600)], group="long", reward=0.0))
    model, gone = tmp_path / "model", tmp_path / "gone"
    fabric.tiny_config(max_position_embeddings=512).save_pretrained(model)
    text = f'run = "{fabric.RUN}"\nsteps = 1\nrecipe = {{drop_zero_variance = false}}\n'
    for folder in (model, gone):
        config = _file(
            tmp_path, f"{folder.name}.toml", f'{text}model = "{folder}"\n[algorithm]\nname = "sft"\n'
        )
        code, out = _run("samples", "--recipe", config, "--store", log.path, "--json")
        assert code == 0
        report = json.loads(out)
        rules = {sample["turn_id"]: sample["rule"] for sample in report["dropped"]}
        if folder == model:
            assert rules == {"odd.0": "outside_vocabulary", "long.0": "too_long"}
            assert report["model_limits"] == {"vocabulary": fabric.VOCAB, "context": 512}
        else:
            assert (rules, report["model_limits"]) == ({}, None)
            code, out = _run("samples", "--recipe", config, "--store", log.path)
            assert f"no model can be read at {gone}" in out.replace("\n", "")
