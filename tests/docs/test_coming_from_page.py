"""docs/coming-from.md: its commands run, and what it says is here is here."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Store
from rollbook.store.sql import columns
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.config.recipe import RecipeConfig

NOT_RUN = ("serve", "service", "train", "replay", "tail")
"""They need a model, or go on until they are stopped."""


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of docs/coming-from.md."""
    return (root / "docs" / "coming-from.md").read_text()


@pytest.fixture
def here(one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run commands in, with a store named demo-store that commands take by default."""
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLBOOK_STORE", "demo-store")
    return tmp_path


def _in_blocks(page: str) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("rollbook ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def _in_text(page: str) -> list[list[str]]:
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    words = [shlex.split(code)[1:] for code in re.findall(r"`(rollbook [^`]+)`", prose)]
    return [command for command in words if command != ["train", "CONFIG"] and len(command) > 1]


def _parse(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("rollbook", list(words))


def test_the_commands_exist_and_run(page: str, here: Path) -> None:
    """Those of the blocks and those within the text have only what there is; all that can be run are run."""
    commands = [*_in_blocks(page), *_in_text(page)]
    assert len(commands) >= 13
    ran = 0
    for words in commands:
        _parse(words)
        if words[0] not in NOT_RUN:
            result = CliRunner().invoke(app, words)
            assert (result.exit_code, bool(result.stdout)) == (0, True), words
            ran += 1
    assert ran >= 10
    assert (here / "rollouts.jsonl").exists()


def test_the_questions_have_right_answers(page: str, one_of_everything: Store) -> None:
    """The reward of each version, and the turns and tokens of each trajectory."""
    curve, turns = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with rb.connect(one_of_everything.path) as connection:
        assert connection.execute(curve).fetchall() == [(0, 3, pytest.approx(2 / 3), 2), (1, 1, 1.0, 1)]
        rows = connection.execute(turns).fetchall()
    assert {(name, count, fidelity, tokens) for name, count, _, fidelity, tokens in rows} == {
        (f"task-{group}-{n}", 2, "exact", 4) for group in (1, 2) for n in (0, 1)
    }


def test_named_configuration_keys_and_columns_exist(page: str) -> None:
    """Configuration keys and view columns that the tables name are there."""
    ours = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    grpo = ("groups", "clip_low", "clip_high")
    for key in (*grpo, "max_staleness", "drop_zero_variance"):
        assert re.search(rf"`(\[algorithm\] )?{key}`", ours), key
        assert key in (Grpo if key in grpo else RecipeConfig).model_fields
    named = {column.name for column in (*columns.TURNS, *columns.TRAJECTORIES)}
    for name in ("version_spans", "labels", "task", "split", "upstream_prompt_tokens"):
        assert re.search(rf"`(turns\.)?{name}`", ours), name
        assert name in named


def test_the_readme_leads_here(root: Path) -> None:
    """By its table of pages."""
    assert "(docs/coming-from.md)" in (root / "README.md").read_text()
