"""docs/diagnosis.md: its queries and commands run, and its signs are those of the code."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Store
from rollbook.train.config.config import EvaluationConfig
from rollbook.train.config.files import load_config
from rollbook.train.doctor.signs import SIGNS


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "diagnosis.md").read_text()


def test_the_queries_and_the_commands_run(
    page: str, root: Path, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a store with a run of that name."""
    steps, evaluations = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    with rb.connect(one_of_everything.path) as connection:
        connection.execute(steps).fetchall()
        assert connection.execute(evaluations).fetchall() == [(2, 0.375, None, 1.0, 1)]
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    run = sorted({event.run for event in one_of_everything.events()})[0]
    shutil.copytree(root / "configs", tmp_path / "configs")
    [function] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # another page's
    lines = "\n".join(re.findall(r"```bash\n(.*?)\n```", page, re.DOTALL)).splitlines()
    answers = (
        '"verdict"',
        '"my_rewards:score',
        '"findings"',
        "course.svg: loss, tokens_s of",
        "speed.png: loss, tokens_s of",
    )
    for line, answer in zip(lines, answers, strict=True):
        result = CliRunner().invoke(app, shlex.split(line.replace("--run demo", f"--run {run}"))[1:])
        assert result.exit_code in (0, 1), result.output
        assert answer in result.output


def test_the_rules_are_read(page: str, tmp_path: Path) -> None:
    """The tables of the page's CONFIG."""
    [tables] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.toml").write_text(tables)
    config = load_config(tmp_path / "train.toml", [])
    assert config.evaluation == EvaluationConfig(every=20)
    assert [rule.dump() for rule in config.stop] == [
        {"metric": "evaluation.loss", "better": "lower", "patience": 3},
        {"metric": "entropy", "below": 0.05, "patience": 10},
    ]


def test_every_check_is_there(page: str) -> None:
    """Each by its name, in the order in which preflight says them."""
    table = page[page.index("| check |") :].split("\n\n")[0]
    named = [row.split("`")[1] for row in table.splitlines()[2:]]
    assert named == [
        *("model", "memory", "batch", "normalization", "kl", "staleness", "correction", "data", "rewards"),
        *("difficulty", "evaluation", "reward_function"),
    ]


def test_every_sign_is_there(page: str) -> None:
    """Each by its name."""
    table = page[page.index("| sign |") :].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == [sign.__name__ for sign in SIGNS]
