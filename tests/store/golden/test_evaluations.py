"""Evaluations and early stops, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import EvalFinished, StopFired

PINNED = "458347c89e1a4cdc"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-evaluations", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-evaluations") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-evaluations")]


def test_what_they_say(golden: Store) -> None:
    """Each evaluation's metrics and what they are of; the rule that held, and the values it judged by."""
    first, second = (event.record for event in golden.events_of({EvalFinished.KIND}))
    assert first.metrics == {"loss": 0.5, "preference_accuracy": 0.75, "preference_margin": None}
    assert (first.policy_version, first.samples, first.tokens, first.trajectories) == (0, 4, 96, 0)
    assert (first.oldest_version, second.oldest_version, second.newest_version) == (None, 5, 7)
    assert (second.cut, second.counted_to) == ("serve=9", "serve=40")
    [stop] = (event.record for event in golden.events_of({StopFired.KIND}))
    rule = {"metric": "evaluation.loss", "better": "lower", "patience": 1}
    judged = [{"policy_version": 0, "value": 0.5}, {"policy_version": 8, "value": 0.625}]
    assert stop == StopFired("actor", 8, "p", rule, judged)


def test_the_view_reads_them(golden: Store) -> None:
    """Sealed and live; what one does not have is null."""
    with rb.connect(golden.path) as connection:
        columns = "policy_version, loss, reward, preference_accuracy, samples, newest_version"
        rows = connection.execute(f"select {columns} from evaluations order by policy_version").fetchall()
    assert rows == [(0, 0.5, None, 0.75, 4, None), (8, 0.625, 1.0, None, 4, 7)]
