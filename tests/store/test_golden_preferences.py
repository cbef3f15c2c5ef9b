"""Preferences, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import PreferenceAdded
from rollbook.store.events.event_json import from_json

PINNED = "ec2c49902f45cd83"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-preferences", tmp_path / "golden"))


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    data = root / "tests" / "data"
    files = sorted(p for p in (data / "format-1-preferences").rglob("*") if p.is_file())
    listed = "".join(f"{p.relative_to(data)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files)
    told = (data / "format-1-preferences.jsonl").read_bytes()
    assert hashlib.sha256(listed.encode() + told).hexdigest()[:16] == PINNED


def test_every_event_is_what_was_written(golden: Store, root: Path, plain: Any) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    lines = (root / "tests" / "data" / "format-1-preferences.jsonl").read_text().splitlines()
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(from_json(json.loads(line))) for line in lines]


def test_what_they_say(golden: Store) -> None:
    """Chosen and rejected, by how much, whose word it is, and whose key added it."""
    found = [event.record for event in golden.events_of({PreferenceAdded.KIND})]
    assert found == [
        PreferenceAdded("t2", "t1", 0.75, "a person", "nightly-judge"),
        PreferenceAdded("t1", "t2", None, "label", None),
    ]
