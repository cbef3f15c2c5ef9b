"""Agents evaluated at a version, as the release that brought it wrote it, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import EvalSampled, EvalStarted

PINNED = "eddd22a06d279175"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-evaluated", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-evaluated") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-evaluated")]


def test_what_they_say(golden: Store) -> None:
    """Which version, whose launches, how many: written out, so that no field can change unseen."""
    started = [event.record for event in golden.events_of({EvalStarted.KIND})]
    assert started == [EvalStarted("actor", 0, "p"), EvalStarted("actor", 50, "p#2")]
    sampled, again = (event.record for event in golden.events_of({EvalSampled.KIND}))
    assert sampled == EvalSampled(
        policy="actor",
        policy_version=50,
        rollout="rollouts.eval.50",
        trajectories=64,
        by="launching",
    )
    assert again.by is None
