"""docs/service.md says of every route of the client whether it is served, and names losses and defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from page_service import TABLES, render
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.service.app import NOT_SERVED
from rollbook.service.worker import STEPS_BETWEEN
from rollbook.store.config import described
from rollbook.train.tenants.losses import LOSSES


def _page(root: Path) -> str:
    return (root / "docs" / "service.md").read_text()


def test_the_page_names_what_is_not_served(root: Path) -> None:
    """By route, as the service refuses it."""
    [row] = [line for line in _page(root).splitlines() if line.endswith("| not served |")]
    assert re.findall(r"`([\w/{}]+)`", row) == [path for _, path, _ in NOT_SERVED]


def test_the_page_names_losses_and_their_defaults(root: Path) -> None:
    """All that there are, with the numbers that hold."""
    page = " ".join(_page(root).split())
    named = re.search(r"Losses are sums over tokens: ((?:`\w+`(?:, )?)+)", page)
    assert named
    assert re.findall(r"`(\w+)`", named[1]) == list(LOSSES)
    for loss in LOSSES.values():
        for key, value in loss.defaults.items():
            assert f"`{key}` {value:g}" in page
    assert f"every {STEPS_BETWEEN} optimizer steps" in page


def test_the_configuration_is_one(root: Path, tmp_path: Path) -> None:
    """The file on the page is read, and shown with its defaults."""
    block = re.search(r"```toml\n(.*?)```", _page(root), re.DOTALL)
    assert block
    file = tmp_path / "service.toml"
    file.write_text(block[1])
    shown = CliRunner().invoke(app, ["service", str(file), "--store", str(tmp_path), "--show-config"])
    assert shown.exit_code == 0, shown.output
    assert tomllib.loads(shown.output).items() >= tomllib.loads(block[1]).items()


def test_the_page_of_keys_is_the_rendered_one(root: Path) -> None:
    """It is generated, never edited; each key says what it is."""
    page = (root / "docs" / "service-configuration.md").read_text()
    assert page == render(), "it is old: python docs/render/page_service.py > docs/service-configuration.md"
    for model in TABLES.values():
        assert set(described(model)) >= set(model.model_fields) - {"sampler", "limits"}


def test_every_configuration_is_one(root: Path, tmp_path: Path) -> None:
    """Each file on the page is read."""
    blocks = re.findall(r"```toml\n(.*?)```", _page(root), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        (tmp_path / "service.toml").write_text(block)
        words = ["service", str(tmp_path / "service.toml"), "--store", str(tmp_path), "--show-config"]
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0, shown.output
        (tmp_path / "shown.toml").write_text(shown.output)
        words[1] = str(tmp_path / "shown.toml")
        assert CliRunner().invoke(app, words).output == shown.output
