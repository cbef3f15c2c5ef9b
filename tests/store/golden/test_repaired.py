"""A store that was repaired, as the release that brought that wrote it, is read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import SegmentRepaired
from rollbook.store.upkeep.verify import verify_store

PINNED = "40a8b7a6444848d5"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-repaired", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-repaired") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """The event of the segment that is gone comes from the unit, the next one's from its WAL file."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-repaired")]
    assert events[2].record == SegmentRepaired("notes", 1, "00000001-00000002.1", 0, 1, "checksum mismatch")
    assert [lane.fault for lane in verify_store(golden)] == [None, None]
