"""What engines that serve a version say of how they hold it is read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import PolicyActivated
from rollbook.store.events.upcast import upcast

PINNED = "63de8479470aa30c"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-held", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-held") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-held")]
    records = {e.record.engine: e.record for e in events if isinstance(e.record, PolicyActivated)}
    assert list(records) == ["embedded", "http://two", "http://one", "http://gpu", "http://older"]
    two = {
        **{"checksum": "sha256", "dtype": "bfloat16", "head_dim": 4, "padded": True, "tp_size": 2},
        **{"tp_ranks": [0, 1], "merged": ["gate_up_proj", "qkv_proj", "w13_weight", "w2_weight"]},
    }
    assert [record.held for record in records.values()] == [
        None,
        two,
        two | {"dtype": "float32", "padded": False, "tp_size": 1, "tp_ranks": [0], "merged": []},
        two | {"checksum": "tiled"},
        None,
    ]
    assert [record.checksums[:8] for record in records.values()] == [
        *("", "c96695fc", "5bb11e45", "26dda3cb", "c96695fc")
    ]


def test_before_version_3_it_was_not_written_down() -> None:
    """What an older event says of it is nothing."""
    assert upcast("policy.activated", 2, {"checksums": "c"}) == {"checksums": "c", "held": None}
    assert upcast("policy.activated", 1, {}) == {"weight_name": "", "checksums": "", "held": None}
