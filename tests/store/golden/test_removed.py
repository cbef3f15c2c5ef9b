"""Checkpoints that were removed, as the release that brought that wrote it, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import CheckpointRemoved
from rollbook.store.fold.history import fold_history

PINNED = "5f6430c9560bd32c"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-removed", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-removed") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-removed")]
    first, second = (f"checkpoints/golden/actor/v0000000{v}" for v in (1, 2))
    assert [e.record for e in events if e.kind == "checkpoint.removed"] == [
        CheckpointRemoved("actor", 1, first, "w1", "o1", "[checkpoint] keep_last 1"),
        CheckpointRemoved("actor", 2, second, "w2", "o2", "[checkpoint] keep_last 1"),
    ]


def test_what_is_made_of_them(golden: Store) -> None:
    """What was written again is there; SQL says when the other one went."""
    history = fold_history(golden.events(), "golden", "actor")
    assert history.held_versions == [1, 3]
    assert [removed.policy_version for removed in history.removed] == [2]
    with rb.connect(golden.path) as connection:
        rows = connection.execute(
            "select policy_version, removed is null from policies order by 1"
        ).fetchall()
    assert rows == [(1, True), (2, False), (3, True)]
