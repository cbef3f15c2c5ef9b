"""Every command of docs/interchange.md runs, in the page's order, in a folder that holds demo-store."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
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
    by_ray = [command for command in commands if "--ray" in command]
    assert (len(commands), commands[6:]) == (8, by_ray)
    answers = [_answer(command, root, tmp_path) for command in commands[:6]]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["chats.jsonl", "dataset", "tables"]
    assert answers[1].startswith(
        f"wrote out/chats.jsonl: {len(train)} trajectories, {len(paths)} paths, as of "
    )
    assert re.search(rf"train: Dataset\(\{{.*'input_ids'.*num_rows: {len(paths)}\b", answers[3], re.DOTALL)
    assert answers[4].startswith(f"imported {sum(1 for t in train if list(t.paths()))} trajectories (")
    assert answers[5]


def _answer(command: str, root: Path, folder: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment["PYTHONPATH"] = str(root / "src")
    name, *words = shlex.split(command)
    start = {"rollbook": [sys.executable, "-m", "rollbook"], "python": [sys.executable]}[name]
    done = subprocess.run([*start, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.ranks
def test_the_commands_by_ray(
    one_of_everything: Store, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each starts a Ray of its own, and gives what it gives without."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    page = (root / "docs" / "interchange.md").read_text()
    samples, export = re.findall(r"^(rollbook .*) --ray 2$", page, re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a short path: sockets are in it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        assert _answer(f"{samples} --ray 2", root, tmp_path) == _answer(samples, root, tmp_path)
        _answer(f"{export} --ray 2", root, tmp_path)
    _answer(export.replace("by-ray", "here"), root, tmp_path)
    assert (tmp_path / "out/by-ray.jsonl").read_bytes() == (tmp_path / "out/here.jsonl").read_bytes() != b""


def test_the_line_that_is_shown_can_be_imported(root: Path, tmp_path: Path) -> None:
    """Each JSON block of the page is a chat."""
    from rollbook.store.interchange.importing import import_chats

    page = (root / "docs" / "interchange.md").read_text()
    [shown] = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "one.jsonl"
    file.write_text(shown)
    assert import_chats(file, tmp_path / "store", "r")["added"] == 1
    assert orjson.loads(shown)["reward"] == pytest.approx(1.0)
