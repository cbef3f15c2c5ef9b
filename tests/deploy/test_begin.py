"""deploy/begin.py: a container's volume becomes one of a store's hosts, with the settings of now."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store.hosts.create import create
from rollbook.store.hosts.join import join
from rollbook.store.marker import read_marker
from rollbook.store.settings import MediumSettings, read_settings

SETTINGS = '[medium]\nurl = "${MEDIUM}"\nlease_s = %s\n[remote]\nuri = "s3://rollouts/here"\n'


@pytest.fixture
def begin(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module, with `rollbook` on the path, and settings that name a folder as the medium."""
    spec = importlib.util.spec_from_file_location("begin", root / "deploy" / "begin.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "rollbook"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rollbook "$@"\n')
    program.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{root / 'src'}",
        "STORE_ID": "rollouts-1",
        "MEDIUM": f"file://{tmp_path}/medium",
        "ROLLBOOK_ALLOW": f"{tmp_path}",
    }.items():
        monkeypatch.setenv(name, value)
    return module


def test_an_empty_volume_becomes_a_host(begin: Any, tmp_path: Path) -> None:
    """Who comes first makes the store, of the id that all know; a second start changes its settings alone."""
    folder = (
        tmp_path / "data" / "runs"
    )  # beside it a file system may have folders of its own, such as lost+found
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    begin.begin(folder, SETTINGS.replace("${MEDIUM}", os.environ["MEDIUM"]) % 6)
    assert read_marker(folder) == "rollouts-1"
    assert read_settings(folder).remote.uri == "s3://rollouts/here"
    marker = (folder / "STORE.json").read_bytes()
    begin.begin(folder, SETTINGS.replace("${MEDIUM}", os.environ["MEDIUM"]) % 7)
    assert read_settings(folder).medium.lease_s == 7
    assert (folder / "STORE.json").read_bytes() == marker
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert names == [".runs.begin", "lost+found", "runs"]


def test_it_becomes_its_command(root: Path, begin: Any, tmp_path: Path) -> None:
    """As a program: without settings at once; with them, it says which variable is missing."""
    program = (root / "deploy" / "begin.py").read_text()
    words = [sys.executable, "-c", program, "sh", "-c", "echo $0 $$", "it"]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    said, _ = done.communicate(timeout=60)
    assert said == f"it {done.pid}\n"
    (tmp_path / "store.toml").write_text("${NOBODY_SETS_THIS}")
    program = program.replace("/etc/rollbook/store.toml", f"{tmp_path}/store.toml")
    own = {"ROLLBOOK_STORE": f"{tmp_path}/runs"} | os.environ
    failed = subprocess.run([sys.executable, "-c", program, "true"], capture_output=True, text=True, env=own)
    assert failed.returncode == 1
    assert failed.stderr.startswith("the variable NOBODY_SETS_THIS is not set")


def test_of_two_that_make_a_store_one_does(tmp_path: Path) -> None:
    """And both have the same one; an id that could be no folder's name is refused."""
    settings = MediumSettings()
    url = f"file://{tmp_path}/medium/rollouts-1"
    assert [create(url, settings) for _ in range(2)] == [True, False]
    for name in ("a", "b"):
        join(tmp_path / name, url, settings)
    assert (tmp_path / "a" / "STORE.json").read_bytes() == (tmp_path / "b" / "STORE.json").read_bytes()
    with pytest.raises(rb.errors.ConfigError, match=r"'Rollouts_1' can be no store's id"):
        create(f"file://{tmp_path}/medium/Rollouts_1", settings)
