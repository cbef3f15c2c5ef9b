"""docs/recipes.md: its recipe is one, its commands run, and its rules are those of the code."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.store import Store
from rollbook.train.config.files import load_recipe
from rollbook.train.select.recipe import RULES

OF_GROUPS = ("top_fraction", "group_incomplete", "zero_variance", "unpaired", "pair_broken")
"""Rules that compare samples: `train/select/sorting.py` and `train/batches/units.py` have them."""


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "recipes.md").read_text()


def test_the_commands_run(
    page: str, root: Path, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the page's own recipe, on a store with a run of that name."""
    [recipe] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "best.toml").write_text(recipe)
    assert load_recipe(tmp_path / "best.toml").recipe.top_fraction == 0.5
    shutil.copytree(root / "configs", tmp_path / "configs")
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    runs = sorted({event.run for event in one_of_everything.events()})
    for line in block.splitlines():
        words = shlex.split(line.replace("--run demo", f"--run {runs[0]}"))
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
        assert "keeps" in result.output or '"both"' in result.output


def test_every_rule_is_there(page: str) -> None:
    """Those of samples, those of groups, and those of pairs."""
    table = page[page.index("| rule |") :].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted([*RULES, *OF_GROUPS])
