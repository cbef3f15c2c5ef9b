"""Fields that came later than their kinds of events, as they were first written, are read for ever; and there
is a golden store for each field of each kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import (
    RECORDS,
    EvalFinished,
    LaunchEnded,
    LaunchStarted,
    Record,
    SampleDropped,
    TurnCompleted,
    TurnFailed,
)
from rollbook.store.events.event_json import from_json

PINNED = "9fe0675365a8802b"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-later", tmp_path / "golden"))


def _records(log: Store, kind: type[Any]) -> list[Any]:
    return [event.record for event in log.events_of({kind.KIND})]


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-later") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-later")]


def test_what_they_say(golden: Store) -> None:
    """The later fields, written out, so that none can change unseen: sealed, then live."""
    assert [(e.expected, e.whole) for e in _records(golden, EvalFinished)] == [(32, False), (32, True)]
    assert _records(golden, EvalFinished)[0].partial == "NOT WHOLE: 22 of 32 trajectories"
    assert [launch.places for launch in _records(golden, LaunchStarted)] == [32, 64]
    assert [launch.proxy_away for launch in _records(golden, LaunchEnded)] == [True, False]
    [answered], [failed] = _records(golden, TurnCompleted), _records(golden, TurnFailed)
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    assert answered.upstream == {"id": "chatcmpl-é", "usage": usage, "choice": {"index": 0}}
    assert (failed.prompt_ids.dtype, failed.prompt_ids.tolist()) == (np.int32, [1, 2, 2**31 - 1])
    assert (failed.prompt_length, failed.prompt_sha256[:8]) == (3, "74aa3266")
    [dropped] = _records(golden, SampleDropped)
    assert (dropped.attempt, dropped.policy_version, dropped.cut) == (4, 2, "serve=9")


def test_the_views_read_them(golden: Store) -> None:
    """Sealed and live."""
    with rb.connect(golden.path) as connection:
        launches = connection.execute(
            "select attempt, places, proxy_away from launches order by 1"
        ).fetchall()
        columns = "policy_version, trajectories, expected, whole"
        evaluations = connection.execute(f"select {columns} from evaluations order by 1").fetchall()
    assert launches == [(1, 32, True), (2, 64, False)]
    assert evaluations == [(8, 22, 32, False), (16, 32, 32, True)]


def test_stores_that_are_older_do_not_say(root: Path, tmp_path: Path) -> None:
    """Of what was written before there were these fields, nothing is known."""
    views = {"launches": "places, proxy_away", "evaluations": "expected, whole"}
    for view, columns in views.items():
        older = shutil.copytree(root / "tests" / "data" / f"format-1-{view}", tmp_path / view)
        with rb.connect(older) as connection:
            rows = connection.execute(f"select distinct {columns} from {view}").fetchall()
        assert rows == [(None, None)]


def test_a_golden_store_has_each_field(root: Path) -> None:
    """Of every kind, with another value than its default: a field that is new needs a golden store."""
    missing = {(kind, field.name) for kind, record in RECORDS.items() for field in fields(record)}
    for path in (root / "tests" / "data").glob("format-1*.jsonl"):
        for line in path.read_text().splitlines():
            record = from_json(json.loads(line)).record
            missing -= {(record.KIND, field.name) for field in fields(record) if _is_said(record, field)}
    assert missing == set()


def _is_said(record: Record, field: Field[Any]) -> bool:
    """Whether a field has another value than its default."""
    value = getattr(record, field.name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return isinstance(value, np.ndarray) or bool(value != default)
