"""docs/serving.md says what `rollbook serve` may be told; `--show-config` says what it was told."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from page_serving import render
from typer.main import get_command
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.ingest.settings import ServeSettings, load_settings
from rollbook.store.config import described


def test_the_page_is_the_rendered_one(root: Path) -> None:
    """It is generated, never edited."""
    page = (root / "docs" / "serving.md").read_text()
    assert page == render(), "docs/serving.md is old: python docs/render/page_serving.py > docs/serving.md"


def test_every_key_is_there_and_is_an_option() -> None:
    """With its meaning, which is the option's help."""
    page, command = render(), get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", [], resilient_parsing=True)
    helps = {option: p.help for p in command.get_params(context) if hasattr(p, "help") for option in p.opts}
    texts = described(ServeSettings)
    assert list(texts) == list(ServeSettings.model_fields)
    for name, text in texts.items():
        assert any(line.startswith(f"| `{name}` |") and text in line for line in page.splitlines())
        assert helps[f"--{name.replace('_', '-')}"] == text


def test_the_example_of_the_page_is_a_file_of_settings(tmp_path: Path) -> None:
    """It can be read."""
    (tmp_path / "serve.toml").write_text(render().partition("```toml\n")[2].partition("```")[0])
    assert load_settings(tmp_path / "serve.toml", {}).max_running == 1024


@pytest.mark.parametrize("ask", [None, '{"return_token_ids": true}'])
def test_what_holds_is_a_file_of_settings(tmp_path: Path, ask: str | None) -> None:
    """What `--show-config` prints means the same, without a secret. Nothing is served."""
    path = tmp_path / "serve.toml"
    path.write_text('port = 9\nrun = "filed"\n')
    words = ["serve", str(path), "--run", "given", "--no-seal", "--engine-url", "http://me:word@host:1"]
    words += ["--show-config", "--engine-key", "sesame", *(["--engine-ask", ask] if ask else [])]
    result = CliRunner().invoke(app, words, env={"ROLLBOOK_STORE": str(tmp_path / "none")})
    assert result.exit_code == 0, result.output
    shown = tomllib.loads(result.stdout)
    assert (shown["port"], shown["run"], shown["seal"]) == (9, "given", False)
    assert (shown["store"], shown["engine_url"]) == (str(tmp_path / "none"), ["http://host:1"])
    assert shown.get("engine_ask") == ({"return_token_ids": True} if ask else None)
    assert "word" not in result.stdout
    assert "sesame" not in result.stdout
    (tmp_path / "shown.toml").write_text(result.stdout)
    assert load_settings(tmp_path / "shown.toml", {}).model_dump(mode="json")["run"] == "given"
    assert "# model: not set" in result.stdout
    assert not (tmp_path / "none").exists()
