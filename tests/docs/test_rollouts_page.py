"""docs/rollouts.md and the page of its keys say what `rollbook rollout` may be told."""

from __future__ import annotations

from pathlib import Path

from page_rollouts import TABLES, render

from rollbook.rollouts.config import load_rollouts
from rollbook.rollouts.launchers.agent_environment import Address, variables
from rollbook.rollouts.outcome import Status
from rollbook.rollouts.tasks import Task
from rollbook.store.config import described


def test_the_page_of_keys_is_the_rendered_one(root: Path) -> None:
    """It is generated, never edited; each key says what it is."""
    page = (root / "docs" / "rollout-configuration.md").read_text()
    assert page == render(), "it is old: python docs/render/page_rollouts.py > docs/rollout-configuration.md"
    for model in TABLES.values():
        assert list(described(model)) == list(model.model_fields)


def test_the_example_is_a_configuration(root: Path, tmp_path: Path) -> None:
    """It can be read."""
    page = (root / "docs" / "rollouts.md").read_text()
    (tmp_path / "rollouts.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    config = load_rollouts(tmp_path / "rollouts.toml")
    assert (config.name, config.samples, config.score[0].name) == ("sums", 4, "correct")


def test_every_variable_and_status_is_told(root: Path, tmp_path: Path) -> None:
    """Each that a program gets, and each that a launch may end with."""
    page = (root / "docs" / "rollouts.md").read_text()
    (tmp_path / "rollouts.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    agent = load_rollouts(tmp_path / "rollouts.toml").agent
    environment = variables(agent, Address("http://h", "t", "k"), "g", Task("t", {}), tmp_path, {})
    assert [name for name in environment if f"`{name}`" not in page] == []
    assert [status.value for status in Status if f"| `{status.value}` |" not in page] == []
