"""What clients of the training service asked, and how it ended, is read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.train.tenants.operations import Operations

PINNED = "3956c879dd5bfb42"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-service", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-service") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    assert [plain(e) for e in golden.events()] == [plain(e) for e in written_in("format-1-service")]


def test_the_operations_are_folded(golden: Store) -> None:
    """A model with five operations that ended, of which one failed, and one that waits for its number; of the
    weights that one saved nothing is left."""
    operations = Operations()
    for event in golden.events():
        operations.add(event.record)
    model, copy = operations.models.values()
    assert (model.owner, model.done, model.next, model.pending) == ("alice", 5, None, 1)
    assert [bool(o.ended and o.ended.error) for o in (model.operations[n] for n in reversed(range(5)))] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert (set(operations.sessions), operations.over) == ({"s1", "s2"}, {"s2"})
    assert (copy.model_id, copy.copy_of, copy.saved, model.saved) == ("s2:train:0", "s1:train:0", {}, {})
    assert (operations.gone, operations.freed) == ({}, {"checkpoints/s1.train.0/operation-00000004"})
    assert operations.copies == {("bob", "key-2"): "tinker://s2:train:0/weights/best"}
