"""docs/online.md and the page of keys say what `rollbook run` may be told."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_run import TABLES, render

from rollbook.online.config import load_whole
from rollbook.online.parts import specs_of
from rollbook.store.config import described


def test_the_page_of_keys_is_the_rendered_one(root: Path) -> None:
    """It is generated, never edited; each key says what it is."""
    page = (root / "docs" / "run-configuration.md").read_text()
    assert page == render(), "it is old: python docs/render/page_run.py > docs/run-configuration.md"
    for model in TABLES.values():
        assert list(described(model)) == list(model.model_fields)


def test_the_example_is_a_configuration(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be read, and its commands start what the page says, in that order."""
    page = (root / "docs" / "online.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("online.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    config = load_whole(Path("online.toml"), ["train.steps=400"])
    assert config.train is not None
    assert config.rollout is not None
    assert (config.train.steps, config.rollout.samples) == (400, 8)
    assert [spec.name for stage in specs_of(config) for spec in stage] == [
        *("engine 127.0.0.1:30000", "engine 127.0.0.1:30001", "proxy", "trainer", "rollouts")
    ]
    assert [spec.name for stage in specs_of(config, ["engines"]) for spec in stage] == [
        *("engine 127.0.0.1:30000", "engine 127.0.0.1:30001")
    ]
