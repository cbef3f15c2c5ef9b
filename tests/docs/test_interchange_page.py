"""Every command of docs/interchange.md runs, in the page's order, in a folder that holds demo-store."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from rollbook.store import Store


@pytest.mark.more
def test_the_commands_export_and_import(one_of_everything: Store, tmp_path: Path, root: Path) -> None:
    """The page's exports exist, its imports add each line once, and `datasets` reads the dataset."""
    recorded = one_of_everything.trajectories().values()
    train = [t for t in recorded if t.opened.split == "train"]
    paths = [path for t in train for path in t.paths()]
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    page = (root / "docs" / "interchange.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).splitlines()
    assert len(commands) == 6
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = str(root / "src")
    answers = []
    for command in commands:
        name, *words = shlex.split(command)
        start = {"rollbook": [sys.executable, "-m", "rollbook"], "python": [sys.executable]}[name]
        done = subprocess.run([*start, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        answers.append(done.stdout)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["chats.jsonl", "dataset", "tables"]
    assert answers[1].startswith(
        f"wrote out/chats.jsonl: {len(train)} trajectories, {len(paths)} paths, as of "
    )
    assert re.search(rf"train: Dataset\(\{{.*'input_ids'.*num_rows: {len(paths)}\b", answers[3], re.DOTALL)
    assert answers[4].startswith(f"imported {sum(1 for t in train if list(t.paths()))} trajectories (")
    assert answers[5]


def test_the_line_that_is_shown_can_be_imported(root: Path, tmp_path: Path) -> None:
    """Each JSON block of the page is a chat."""
    from rollbook.store.interchange.importing import import_chats

    page = (root / "docs" / "interchange.md").read_text()
    [shown] = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "one.jsonl"
    file.write_text(shown)
    assert import_chats(file, tmp_path / "store", "r")["added"] == 1
    assert orjson.loads(shown)["reward"] == pytest.approx(1.0)
