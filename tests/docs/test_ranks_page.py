"""docs/ranks.md: its configuration trains on the ranks that it says, and its commands run, in their order."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.bench.scripted.dialogues import write_model
from rollbook.cli.app import app
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.ranks.ray_ranks import FAMILIES, VARIABLES

pytestmark = pytest.mark.ranks


def _invoke(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, query and replay."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    page = (root / "docs" / "ranks.md").read_text()
    tokens = write_model(tmp_path / "my-model")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    size = {"vocab_size": tokens.get_vocab_size(), **small, **heads}
    Qwen3ForCausalLM(Qwen3Config(**size)).save_pretrained(tmp_path / "my-model")
    rows = [{"prompt": f"What is {i} + 2?", "completion": f"{i + 2}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _invoke("import rows.jsonl --store runs --run first --model my-model")
    [config] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ranks.toml").write_text(config)
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    train, query, replay, place = (command.removeprefix("rollbook ") for command in commands.splitlines())
    _invoke(train)
    assert _of_two(query) == 4
    assert "bit for bit" in _invoke(replay)
    with _ray_here():
        _invoke(place)
    assert _of_two(query) == 8
    assert "bit for bit" in _invoke(f"{replay} --run placed")


def _of_two(query: str) -> int:
    """The steps of two ranks that share matrices."""
    output = _invoke(f"{query} --format csv")
    return output.replace('""', '"').replace(" ", "").count('"tensor":2')


@contextlib.contextmanager
def _ray_here() -> Iterator[None]:
    """Context: Ray starts a cluster of its own, whose files are gone with it."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: sockets are in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    shutil.rmtree(folder)


def test_variables_that_ranks_get(root: Path) -> None:
    """The page names them all."""
    text = re.search(r"they get only (.*?)\. They", (root / "docs" / "ranks.md").read_text(), re.DOTALL)
    assert text
    assert set(re.findall(r"`(\w+)`", text[1])) == {*VARIABLES, *FAMILIES}


def test_the_tables_keys_are_keys(root: Path) -> None:
    """Each is a size of `[parallel]`."""
    keys = re.findall(r"^\| `(\w+)` ", (root / "docs" / "ranks.md").read_text(), re.MULTILINE)
    assert keys
    assert set(keys) <= set(ParallelConfig.model_fields)
