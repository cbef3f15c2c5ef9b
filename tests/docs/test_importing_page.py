"""docs/importing.md: its commands run, its shapes are the shapes, and its files are the files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.bench.scripted.dialogues import write_model
from rollbook.cli.app import app
from rollbook.ingest.datasets.files import PACKED, READERS
from rollbook.ingest.datasets.formats import SHAPES
from rollbook.store.events import StepCommitted

SFT = """
run = "sft"
model = "my-model"
steps = {steps}
device = "cpu"
[algorithm]
name = "sft"
batch_size = 2
[recipe]
splits = ["teacher"]
"""


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "importing.md").read_text()


def _invoke(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    return result.output.replace("\n", " ")


def test_its_commands(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import, and the training: it imports what is new, and what goes on imports nothing twice."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    tokens = write_model(tmp_path / "my-model")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    size = {"vocab_size": tokens.get_vocab_size(), **small, **heads}
    Qwen3ForCausalLM(Qwen3Config(**size)).save_pretrained(tmp_path / "my-model")
    chats = [{"prompt": f"{number} and two?", "completion": "Four."} for number in range(3)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    imports, trains = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert "imported 3 trajectories (3 turns) into run sft" in _invoke(imports)
    chats.append({"prompt": "Five and two?", "completion": "Seven."})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    for steps, added, there in ((1, 1, 3), (2, 0, 4)):
        (tmp_path / "sft.toml").write_text(SFT.format(steps=steps))
        output = _invoke(trains)
        assert (
            f"imported {added} trajectories ({added} turns) into run sft of runs; {there} were there"
            in output
        )
        log = rb.open("runs")
        assert len(log.trajectories()) == 4
        assert sum(1 for _ in log.events_of({StepCommitted.KIND})) == steps
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    refused = CliRunner().invoke(app, shlex.split(trains)[1:])
    assert "also the rejected answer" in str(refused.exception)
    for more in ("--source tail", "--as-of step:1"):
        assert CliRunner().invoke(app, [*shlex.split(trains)[1:], *more.split()]).exit_code == 2
    without = [word for word in shlex.split(trains)[1:] if word not in ("--data", "chats.jsonl")]
    assert CliRunner().invoke(app, [*without, "--format", "alpaca"]).exit_code == 2


def test_ranks_that_follow_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher gives all ranks the same command, and rank 0 alone does what comes first."""
    from rollbook.cli.train.training import run_train
    from rollbook.train.config.files import load_config
    from rollbook.train.ranks import ranks

    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    launched["ROLLBOOK_RANKS_SECRET"] = "a text that nobody guesses, of some length"
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    followed: list[object] = []
    monkeypatch.setattr(ranks, "follow_at", lambda *place: followed.append(place))
    (tmp_path / "sft.toml").write_text(SFT.format(steps=1))
    config = load_config(tmp_path / "sft.toml", [])
    run_train(
        config, tmp_path / "s", "cut", "head", "train", None, None, None, lambda: pytest.fail("imported")
    )
    assert len(followed) == 1


def test_its_tables(page: str) -> None:
    """Of shapes, in the order in which they are looked for, and of files."""
    shapes, _, files = (table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE))
    assert [re.findall(r"`([\w-]+)`", line)[0] for line in shapes] == list(SHAPES)
    named = set(re.findall(r"`(\.[a-z.]+)`", "".join(files)))
    assert {name for name in named if name.count(".") == 1} == READERS.keys()
    packed = {Path(name) for name in named if name.count(".") == 2}
    assert {name.suffix for name in packed} == PACKED.keys()
