"""docs/preferences.md: what it sends is taken, its configuration is one, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.bench.scripted.dialogues import write_model
from rollbook.cli.app import app
from rollbook.ingest.datasets.formats import converted
from rollbook.ingest.fields import AddPreference
from rollbook.store import Store
from rollbook.train.algorithms.preferences import Dpo
from rollbook.train.algorithms.reward_models import RewardModel
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
    preference = AddPreference.model_validate(json.loads(words[words.index("-d") + 1]))
    assert (preference.chosen, preference.rejected, preference.margin, preference.source) == (
        "task-7-2",
        "task-7-0",
        1.5,
        "reviewer",
    )


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
    result = CliRunner().invoke(app, [*shlex.split(shown)[1:], "--run", runs[0]])
    assert result.exit_code == 0, result.output
    assert re.search(r"keeps \d+ samples of \d+ trajectories in \d+ pairs", result.output)
    assert shlex.split(trained)[1:3] == ["train", "dpo.toml"]


def test_what_it_imports(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the page, and the table's formats."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "my-model")
    (tmp_path / "pairs.jsonl").write_text(_block(page, "json"))
    result = CliRunner().invoke(app, shlex.split(_block(page, "bash", 1))[1:])
    assert result.exit_code == 0, result.output
    assert "imported 2 trajectories (2 turns), 1 preferences" in result.output.replace("\n", " ")
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    other = [chat[0], {"role": "assistant", "content": "5"}]
    values = {"messages": chat, "prompt": "2+2?", "completion": "4", "chosen": chat, "rejected": other}
    values |= {"label": True, "margin": 1, "score_chosen": 1, "score_rejected": 0}
    table = page[page.index("| a row has |") :].split("\n\n")[0].splitlines()[2:]
    for required, rest in (line.strip("|").split("|") for line in table):
        keys = re.findall(r"`(\w+)`", required)
        more = [key for key in re.findall(r"`(\w+)`", rest) if key in values]
        assert len(converted({key: values[key] for key in (*keys, *more)}).lines) == 1 + ("chosen" in keys)


@pytest.mark.more
def test_what_it_rates(page: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward model of the page is trained on imported pairs, and scores what was imported."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    tokens = write_model(tmp_path / "my-model")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    size = {"vocab_size": tokens.get_vocab_size(), **small, **heads}
    Qwen3ForCausalLM(Qwen3Config(**size)).save_pretrained(tmp_path / "my-model")
    row = json.loads(_block(page, "json"))
    for split, numbers in (("teacher", range(8)), ("eval", range(8, 12))):
        rows = [row | {"prompt": f"What is {i} + 2?"} for i in numbers]
        (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(item) for item in rows))
        _invoke(f"{_block(page, 'bash', 1)[9:].strip()} --split {split}")
    (tmp_path / "reward.toml").write_text(_block(page, "toml", 1).replace("path/to/model", "my-model"))
    commands = _block(page, "bash", 3).splitlines()
    trained, scored, policy = (line.removeprefix("rollbook ") for line in commands)
    _invoke(trained)
    assert "scored 24 trajectories of run demo, as rewards of source judge" in _invoke(scored)
    connection = rb.connect("demo-store")
    query = "SELECT count(*) FROM preferences p, rewards a, rewards b"
    ordered = "a.trajectory_id = p.trajectory_id AND b.trajectory_id = p.rejected_trajectory_id"
    [(pairs,)] = connection.execute(f"{query} WHERE {ordered} AND a.reward > b.reward").fetchall()
    assert pairs == 12
    words = shlex.split(policy)
    config = load_config(root / "configs" / words[1], [words[words.index("--set") + 1]])
    assert config.recipe.reward_source == "judge"


def _invoke(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.output.replace("\n", " ")


def test_the_keys_are_keys(page: str) -> None:
    """And their values are taken."""
    for head, kind, name in (("| key |", Dpo, "dpo"), ("| of `reward_model` |", RewardModel, "reward_model")):
        table = page[page.index(head) :].split("\n\n")[0]
        pairs = re.findall(r"`(\w+) = (\S+?)`", table)
        assert len(pairs) >= 4
        for key, value in pairs:
            kind.model_validate({"name": name, key: json.loads(value)})
