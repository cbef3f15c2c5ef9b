"""A store that was repaired, as the release that brought that wrote it, is read for ever."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import SegmentRepaired
from rollbook.store.events.event_json import from_json
from rollbook.store.upkeep.verify import verify_store

PINNED = "40a8b7a6444848d5"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-repaired", tmp_path / "golden"))


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    data = root / "tests" / "data"
    files = sorted(p for p in (data / "format-1-repaired").rglob("*") if p.is_file())
    listed = "".join(f"{p.relative_to(data)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files)
    told = (data / "format-1-repaired.jsonl").read_bytes()
    assert hashlib.sha256(listed.encode() + told).hexdigest()[:16] == PINNED


def test_every_event_is_what_was_written(golden: Store, root: Path, plain: Any) -> None:
    """The event of the segment that is gone comes from the unit, the next one's from its WAL file."""
    lines = (root / "tests" / "data" / "format-1-repaired.jsonl").read_text().splitlines()
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(from_json(json.loads(line))) for line in lines]
    assert events[2].record == SegmentRepaired("notes", 1, "00000001-00000002.1", 0, 1, "checksum mismatch")
    assert [lane.fault for lane in verify_store(golden)] == [None, None]
