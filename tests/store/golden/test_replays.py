"""Replays of recorded trajectories are read for ever, and say what was sampled again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import TrajectoryOpened
from rollbook.store.events.upcast import upcast
from rollbook.store.sealed.derived import TRAJECTORIES, build_derived
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.erase import erase_trajectory

PINNED = "547390f3ed32746c"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-replays", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-replays") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-replays")]
    openings = [e.record for e in events if isinstance(e.record, TrajectoryOpened)]
    assert [opened.origin and opened.origin["turn_id"] for opened in openings] == [None, "u1"]


def test_before_version_3_nothing_was_sampled_again() -> None:
    """Nothing could be."""
    assert upcast("trajectory.opened", 2, {"name": "t"}) == {"name": "t", "origin": None}


def _origins(log: Store) -> list[Any]:
    with rb.connect(log.path) as connection:
        trajectories = connection.execute(
            "select trajectory_id, origin->>'$.trajectory_id' from trajectories order by trajectory_id"
        ).fetchall()
        turns = connection.execute("select turn_id, repeats from turns order by turn_id").fetchall()
    return [*trajectories, *turns]


def test_sql_says_what_was_sampled_again(golden: Store) -> None:
    """Sealed with and without derived files, and live."""
    expected = [("t1", None), ("t2", "t1"), ("u1", None), ("u2", "u1")]
    assert _origins(golden) == expected
    [unit] = current_units(golden.path, "replay")
    assert TRAJECTORIES in build_derived(golden.path, unit)
    assert _origins(golden) == expected


def test_an_erasure_names_the_replays_that_are_left(golden: Store) -> None:
    """They repeat its text; the origin stays, since ids are no text."""
    assert erase_trajectory(golden, "t1", "a leak").replays == ("t2",)
    assert erase_trajectory(golden, "t2", "a leak").replays == ()
    assert erase_trajectory(golden, "t1", "again").replays == ()
    assert _origins(golden)[:2] == [("t1", None), ("t2", "t1")]
