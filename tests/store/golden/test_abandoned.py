"""Steps that were abandoned, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import StepAbandoned
from rollbook.store.fold.history import fold_history, gone_versions

PINNED = "950b9b1fd6a2b0e7"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-abandoned", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-abandoned") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-abandoned")]
    assert events[6].record == StepAbandoned(1, 1, "actor", 2, 1, 3)


def test_what_is_made_of_them(golden: Store) -> None:
    """The history and SQL know which step counts, and which version is on the line."""
    history = fold_history(golden.events(), "golden", "actor")
    assert (sorted(history.steps), history.version, history.next_step) == ([0, 2], 4, 3)
    assert history.consumed() == {"u0", "u1"}
    with rb.connect(golden.path) as connection:
        rows = connection.execute("select step, status, output_version from steps order by step").fetchall()
    assert rows == [(0, "committed", 1), (1, "abandoned", 2), (2, "committed", 4)]
    assert gone_versions(history.abandoned.values()) == {2}


def test_what_went_back_further_is_gone_with_it() -> None:
    """A number under which a version went on is on no line, once that version is not."""
    once = [StepAbandoned(4, 1, "actor", 5, 4, 6), StepAbandoned(5, 1, "actor", 7, 6, 8)]
    assert gone_versions(once) == {5, 7}
    further = [StepAbandoned(n, 1, "actor", n + 1, 2, 10) for n in (2, 3)]
    assert gone_versions([*further, *once]) == {3, 4, 5, 6, 7, 8}
