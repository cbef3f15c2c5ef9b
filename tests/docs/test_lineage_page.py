"""docs/lineage.md: its commands run, and the first prints the tables that the page shows, times aside."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import orjson
import pytest

from rollbook.cli import app as cli
from rollbook.lineage import trajectories
from rollbook.store import Store

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def test_the_commands_print_the_tables(
    root: Path,
    one_of_everything: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command succeeds; the first prints the page's block."""
    page = (root / "docs" / "lineage.md").read_text()
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    outputs = []
    for line in block.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        outputs.append(capsys.readouterr().out)
    [shown] = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed = [line.rstrip() for line in TIME.sub("TIME", outputs[0]).splitlines()]
    assert printed == [line.rstrip() for line in TIME.sub("TIME", shown).splitlines()]
    assert orjson.loads(outputs[-1])["version"]["version"] == 2


def test_the_page_names_every_reason(root: Path) -> None:
    """Why a token was not trained."""
    page = (root / "docs" / "lineage.md").read_text()
    reasons = (
        trajectories.UNDELIVERED,
        trajectories.ALTERED,
        trajectories.ERASED,
        trajectories.CUT_OFF,
        trajectories.OTHER_SAMPLE,
    )
    assert all(f"`{reason}`" in page for reason in reasons)
