"""docs/training.md: its configuration trains, and its commands run, in their order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.bench.scripted.dialogues import write_model
from rollbook.cli.app import app
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.files import load_config


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "training.md").read_text()


@pytest.fixture(scope="module")
def configs(page: str) -> list[str]:
    """The page's CONFIGs, each with its file's name in its first line; that of the laptop first."""
    blocks: list[str] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    return blocks


@pytest.fixture
def work(configs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, imported conversations, some of them held out, and the page's CONFIGs."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    tokens = write_model(tmp_path / "my-model")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    size = {"vocab_size": tokens.get_vocab_size(), **small, **heads}
    Qwen3ForCausalLM(Qwen3Config(**size)).save_pretrained(tmp_path / "my-model")
    for split, numbers in (("teacher", range(80)), ("eval", range(80, 90))):
        rows = [{"prompt": f"What is {i} + 2?", "completion": f"{i + 2}"} for i in numbers]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        _invoke(f"import rows.jsonl --store runs --run first --model my-model --split {split}")
    for text in configs:
        (tmp_path / text.split()[1]).write_text(text)
    return tmp_path


def _invoke(command: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.more
def test_the_commands_run(page: str, work: Path) -> None:
    """In their order, for four steps: each says what it should, and what is exported is a model."""
    from transformers import AutoTokenizer

    config = (work / "laptop.toml").read_text()
    for key, value in (("steps", 4), ("warmup_steps", 1), ("every", 2)):
        config = re.sub(rf"^{key} = \d+$", f"{key} = {value}", config, flags=re.MULTILINE)
    (work / "laptop.toml").write_text(config)
    commands, node, plans, shards, adapted = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    of_node, before = node.splitlines()
    for line, ranks in zip([*plans.splitlines(), of_node], (1, 4, 6), strict=True):
        assert f"; {ranks} rank" in _invoke(line.removeprefix("rollbook "))
    output = _invoke(before.removeprefix("rollbook "))
    assert not re.findall(r"^\w+ +red", output, re.MULTILINE), output
    words = [line.removeprefix("rollbook ") for line in commands.splitlines()]
    preflight, train, plot, doctor, replay, export = words
    checked = {line.split()[0]: line.split()[1] for line in _invoke(preflight).splitlines() if line[0] != " "}
    assert checked.items() >= {"model": "green", "memory": "green", "evaluation": "green"}.items()
    _invoke(train)
    assert _invoke(plot).startswith("first.svg: loss, ")
    assert "healthy" in _invoke(doctor)
    assert "bit for bit" in _invoke(replay)
    assert "version 4 of policy actor" in _invoke(export)
    assert AutoTokenizer.from_pretrained("first-model").decode([1])
    times, query, routed = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    steps = _invoke(f'sql "{times}" --format csv --store runs').split()[1:]
    assert [line.split(",")[0] for line in steps] == ["0", "1", "2", "3"]
    of_dense = _invoke(f'sql "{routed}" --format csv --store runs').splitlines()
    assert of_dense[0] == "step,routing_replayed,engine_logprob_gap,own_routing_logprob_gap"
    assert [line.split(",")[1] for line in of_dense[1:]] == [""] * 4
    assert all(float(cell) >= 0 for line in steps for cell in line.split(","))
    assert [row.split(",")[2] for row in _invoke(f'sql "{query}" --format csv --store runs').split()[1:]] == [
        "0",
        "4",
    ]
    train, export = shards.replace("\\\n", "").splitlines()
    _invoke(train.removeprefix("rollbook "))
    assert list(work.glob("runs/checkpoints/second/actor/v00000004/shard-*"))
    assert "version 4 of policy actor, run second" in _invoke(export.removeprefix("rollbook "))
    train, export = (line.removeprefix("rollbook ") for line in adapted.splitlines())
    _invoke(train)
    assert "the adapter of version 4 of policy actor, run adapted" in _invoke(export)
    _loads("my-model", "my-adapter")


def _loads(model: str, adapter: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    assert loaded.peft_config["default"].r == 8


def test_each_way_of_dividing(page: str, configs: list[str], tmp_path: Path) -> None:
    """The table's keys are keys, alone or not at all."""
    keys = re.findall(r"^\| `(\w+ = \d+)` ", page, re.MULTILINE)
    assert len(keys) == 2
    without = [line for line in configs[0].splitlines() if "per_micro" not in line]
    for key in (*keys, ""):
        (tmp_path / "other.toml").write_text("\n".join([key, *without]))
        config = load_config(tmp_path / "other.toml", [])
        assert isinstance(config, TrainConfig)
        assert (config.tokens_per_micro_batch, config.micro_batch_size).count(None) == (1 if key else 2)
