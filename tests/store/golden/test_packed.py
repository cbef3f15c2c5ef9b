"""Steps whose samples are packed, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events.upcast import upcast
from rollbook.store.fold.history import fold_history

PINNED = "97a142ba1a34c7a8"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-packed", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-packed") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-packed")]
    steps = fold_history(iter(events), "golden", "actor").steps.values()
    assert [step.planned.packed for step in steps] == [False, True, True]
    assert [step.planned.partition for step in steps] == [[[[0], [1]]]] * 3


def test_before_version_3_samples_were_padded() -> None:
    """There was no other way."""
    assert upcast("step.planned", 2, {"step": 3}) == {
        "step": 3,
        "packed": False,
        "others": None,
        "lora": None,
        "routing_replay": False,
        "schedule": None,
        "operations": None,
    }
