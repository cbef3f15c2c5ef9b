"""The store of `bench scale` that several of these tests ask, made once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from rollbook.bench.scale_store import store_in

TURNS_HERE = 640


@pytest.fixture(scope="session")
def scale_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the smallest store there is, of `TURNS_HERE` turns. Copy it; never write."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a folder of its own in that of all
        shared = shared.parent
    with FileLock(shared / "scale.lock"):
        store_in(shared / "scale", TURNS_HERE)
    return shared / "scale"


@pytest.fixture(scope="module")
def folder(scale_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that folder, for the tests of a module."""
    return shutil.copytree(scale_folder, tmp_path_factory.mktemp("scale") / "copy")
