"""What steps record of their schedule and of the parts of their stages is read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import SampleDropped, StepVectors
from rollbook.store.events.upcast import upcast
from rollbook.store.fold.history import fold_history

PINNED = "c67cfde5a66c974b"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-evidence", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-evidence") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-evidence")]
    steps = fold_history(iter(events), "golden", "actor").steps
    assert [None if s.planned.schedule is None else s.planned.schedule["number"] for s in steps.values()] == [
        *(None, 1, 2)
    ]
    assert steps[0].committed.hashes is None
    assert steps[2].committed.hashes == {
        "stages": ["samples", "rewards"],
        "samples": "AAECAwQFBgcICQoL",
        "tensors": {"weights": "AAECAwQFBgcICQoL"},
    }
    drops = [e.record for e in events if isinstance(e.record, SampleDropped)]
    assert [(d.policy_version, d.cut) for d in drops] == [
        (None, None),
        (0, "serve=7"),
        (None, None),
        (1, "serve=7"),
    ]
    assert [e.record for e in events if isinstance(e.record, StepVectors)] == [
        StepVectors(2, 1, "actor", "logprobs", "AAAAvwAAAL8=")
    ]


def test_before_none_of_it_was_written_down() -> None:
    """What an older event says of it is nothing."""
    assert upcast("step.planned", 6, {"step": 3}) == {"step": 3, "schedule": None, "operations": None}
    assert upcast("step.committed", 1, {"step": 3}) == {"step": 3, "hashes": None}
    assert upcast("sample.dropped", 2, {"step": 3}) == {"step": 3, "policy_version": None, "cut": None}
