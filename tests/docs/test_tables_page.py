"""docs/tables.md: its commands and its readers run, and give the rows of the store."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.processes.ray_nodes import ray_nodes
from tests.fakes.processes.warm import run_warm

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.settings import read_settings
from rollbook.store.tables.definitions import TABLES
from rollbook.store.tables.publish import KEPT, publish_tables
from rollbook.store.upkeep.sealer import Sealer


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of the page."""
    return (root / "docs" / "tables.md").read_text()


def _blocks(page: str) -> list[str]:
    """Its Python: planning, DuckDB, Polars, Ray, and Daft, which `tests/clients` runs."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    libraries = ("pyiceberg", "duckdb", "polars", "ray", "daft")
    assert [name in block for name, block in zip(libraries, blocks, strict=True)] == [True] * 5
    return blocks


@pytest.fixture
def demo(one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A folder with demo-store, sealed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(one_of_everything.path, "demo-store")
    log = rb.open("demo-store")
    assert Sealer(log).run_once().damage == {}
    return log


def test_the_page_says_what_the_code_does(page: str, tmp_path: Path) -> None:
    """Its settings are settings, its numbers those of the code."""
    [settings] = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "store.toml").write_text(settings)
    assert read_settings(tmp_path).iceberg.publish
    assert f"newest {KEPT} to {2 * KEPT} can" in page
    [bounds] = re.findall(r"bounds of (.*?):", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", bounds)) == set(TABLES[0].bounds)


def test_the_readers_read(page: str, demo: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    publish_tables(demo)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec("".join(_blocks(page)[:3]), names)
    assert len(names["paths"]) == 1
    assert "run" in said.getvalue()


@pytest.mark.more
def test_the_commands_run(page: str, demo: Store, root: Path) -> None:
    """With the output that scripts take."""
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    first, *commands = block.splitlines()
    assert first == 'pip install "rollbook[iceberg]"'
    answers = []
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "COLUMNS": "200"}
        done = run_warm(words, cwd=Path.cwd(), env=environment, text=True)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert re.search(r"^rollbook\.turns +\d+ ", answers[0], re.MULTILINE)
    report = orjson.loads(answers[1])
    assert [table["table"] for table in report["tables"]] == [f"rollbook.{table.name}" for table in TABLES]
    assert {(table["added"], table["removed"]) for table in report["tables"]} == {(0, 0)}


@pytest.mark.more
def test_ray_reads(page: str, demo: Store) -> None:
    """The page's block, on a cluster of its own."""
    pytest.importorskip("ray")
    publish_tables(demo)
    blocks = _blocks(page)
    with ray_nodes(), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(blocks[0] + blocks[3], {})
    assert "trajectory_id" in said.getvalue()
