"""Preferences, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import PreferenceAdded

PINNED = "ec2c49902f45cd83"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-preferences", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-preferences") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-preferences")]


def test_what_they_say(golden: Store) -> None:
    """Chosen and rejected, by how much, whose word it is, and whose key added it."""
    preferences = [event.record for event in golden.events_of({PreferenceAdded.KIND})]
    assert preferences == [
        PreferenceAdded("t2", "t1", 0.75, "a person", "nightly-judge"),
        PreferenceAdded("t1", "t2", None, "label", None),
    ]
