"""How events become rows of policies, steps and consumers: the same, whichever lane is noted first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from sqlalchemy import Engine, event

from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.tables import UNKNOWN_ATTEMPT
from rollbook.store.events import (
    CheckpointWritten,
    CursorMoved,
    PolicyActivated,
    PolicyPublished,
    StepAbandoned,
    StepCommitted,
    StepFailed,
    StepPlanned,
    StepRetired,
)

TABLES = ("policy_versions", "consumers", "steps", "checkpoints")


def _planned(step: int, attempt: int, version: int, cut: str) -> StepPlanned:
    return StepPlanned(
        *(step, attempt, "actor", version, "train", cut, {}, "rd", [], [], {}, {}, 0.1, 7, {}, {}),
    )


def _committed(step: int, attempt: int, version: int) -> StepCommitted:
    return StepCommitted(step, attempt, "actor", version, {}, {})


def _lane(lane: str, *records: Any, start: int = 0, run: str = "demo") -> list[Event]:
    """Events of a lane: the one at `seq` has event time 1,000 + 10 * seq, and the lane's length more."""
    return [
        Event(record, run, f"{lane}-{seq}", 1000 + 10 * seq + len(lane), lane, seq)
        for seq, record in enumerate(records, start)
    ]


TRAIN = _lane(
    "train",
    PolicyPublished("actor", 0, None, "checkpoints/0", "w0"),
    _planned(0, 1, 0, "serve=3"),
    StepFailed(0, 1, "actor", "out of memory"),
    _planned(0, 2, 0, "serve=4"),
    _committed(0, 2, 1),
    CheckpointWritten("actor", 1, "checkpoints/1", "w1", "o1", None, 4096),
    PolicyPublished("actor", 1, 0, "checkpoints/1", "w1"),
    CursorMoved("trainer", "serve=4"),
    _planned(1, 1, 1, "serve=9"),
    CursorMoved("trainer", "serve=9"),
)
SERVE = _lane(
    "serve",
    PolicyActivated("actor", 0, "embedded", "w0-engine", "/model"),
    PolicyActivated("actor", 0, "second", "w0-engine", "/model"),
    PolicyActivated("actor", 1, "embedded", "w1", "checkpoints/1"),
    PolicyActivated("critic", 0, "embedded", "c0", "/critic"),
)
ADMIN = _lane("admin", StepRetired(0, "actor", "old"), StepRetired(5, "actor", "never planned"))

EXPECTED = {
    "policy_versions": [
        ("demo", "actor", 0, "w0", "checkpoints/0", 1005, 1005),
        ("demo", "actor", 1, "w1", "checkpoints/1", 1065, 1025),
        ("demo", "critic", 0, "c0", "/critic", None, 1035),
    ],
    "consumers": [("trainer", "serve=9", 1095, "train", 9)],
    "steps": [
        ("demo", "actor", 0, 1, "retired", 0, None, "serve=3", "train", 1),
        ("demo", "actor", 0, 2, "retired", 0, 1, "serve=4", "train", 3),
        ("demo", "actor", 1, 1, "planned", 1, None, "serve=9", "train", 8),
        ("demo", "actor", 5, UNKNOWN_ATTEMPT, "retired", None, None, None, None, None),
    ],
    "checkpoints": [("checkpoints/1", "demo", "actor", 1, "w1", 4096)],
}


def _rows(store: Store, *groups: Iterable[Event]) -> dict[str, list[tuple[Any, ...]]]:
    catalog = Catalog.of(store.path)
    for group in groups:
        catalog.note_events(group)
    rows = catalog.rows()
    catalog.close()
    return {name: [tuple(row.values()) for row in rows[name]] for name in TABLES}


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
def test_the_order_of_lanes_does_not_count(store: Store, order: tuple[int, ...]) -> None:
    """Whichever lane is noted first, the rows are these; noting all of it again changes nothing."""
    lanes = [(TRAIN, SERVE, ADMIN)[i] for i in order]
    assert _rows(store, *lanes) == EXPECTED
    assert _rows(store, *reversed(lanes)) == EXPECTED


def test_event_by_event_is_the_same(store: Store) -> None:
    """So it is when each event is noted alone, lanes by turns."""
    turns = itertools.zip_longest(ADMIN, SERVE, TRAIN)
    assert _rows(store, *([e] for turn in turns for e in turn if e is not None)) == EXPECTED


def test_an_attempt_goes_from_planned_to_retired(store: Store) -> None:
    """Each event of an attempt gives it its status, and the step's retirement is the last word."""
    steps = _lane("train", _planned(7, 1, 3, "serve=1"), _committed(7, 1, 4), StepRetired(7, "actor", "old"))
    seen = []
    for told in steps:
        seen.append(_rows(store, [told])["steps"][0][4:7])
    assert seen == [("planned", 3, None), ("committed", 3, 4), ("retired", 3, 4)]
    assert _rows(store, steps[:1])["steps"][0][4] == "retired"
    assert _rows(store, _lane("other", StepFailed(8, 1, "actor", "x")))["steps"][1][4] == "failed"


def test_an_attempt_that_was_abandoned(store: Store) -> None:
    """It may be noted before its plan and its commit are; only a retirement comes after it."""
    planned, committed, abandoned = _lane(
        "train", _planned(7, 1, 3, "serve=1"), _committed(7, 1, 4), StepAbandoned(7, 1, "actor", 4, 3, 5)
    )
    row = ("demo", "actor", 7, 1, "abandoned", 3, 4, "serve=1", "train", 0)
    assert _rows(store, [abandoned], [planned, committed])["steps"] == [row]
    assert _rows(store, _lane("upkeep", StepRetired(7, "actor", "old")))["steps"][0][4] == "retired"
    assert _rows(store, [abandoned])["steps"][0][4] == "retired"


def test_an_earlier_status_does_not_come_back(store: Store) -> None:
    """The plan of an attempt that has committed may be noted again: it stays committed."""
    planned, committed = _lane("train", _planned(7, 1, 3, "serve=1"), _committed(7, 1, 4))
    assert _rows(store, [committed], [planned])["steps"] == [
        ("demo", "actor", 7, 1, "committed", 3, 4, "serve=1", "train", 0)
    ]
    assert _rows(store, [planned])["steps"][0][4] == "committed"


def test_runs_and_policies_are_apart(store: Store) -> None:
    """The same step and version of another run or policy is another row."""
    here = _lane("train", _planned(0, 1, 0, "serve=1"), PolicyPublished("actor", 0, None, "p", "w"))
    there = _lane("others", _planned(0, 1, 0, "serve=2"), StepRetired(0, "actor", "old"), run="other")
    critic = _lane("train", PolicyPublished("critic", 0, None, "q", "c"), start=2)
    rows = _rows(store, here, there, critic)
    assert [(r[0], r[4], r[7]) for r in rows["steps"]] == [
        ("demo", "planned", "serve=1"),
        ("other", "retired", "serve=2"),
    ]
    assert [r[:4] for r in rows["policy_versions"]] == [("demo", "actor", 0, "w"), ("demo", "critic", 0, "c")]


def test_a_version_published_again(store: Store) -> None:
    """After a crash the trainer may publish a version anew, elsewhere: that is what counts."""
    first = PolicyPublished("actor", 1, 0, "checkpoints/1", "w1")
    again = PolicyPublished("actor", 1, 0, "checkpoints/1-8f", "w1b")
    events = _lane("train", first, again)
    expected = ("demo", "actor", 1, "w1b", "checkpoints/1-8f", 1015, None)
    assert _rows(store, events)["policy_versions"] == [expected]
    assert _rows(store, reversed(events))["policy_versions"] == [expected]


def test_a_cursor_may_go_back(store: Store) -> None:
    """A consumer's last word counts, a smaller cut too: by its place in a lane, between lanes by time."""
    moves = _lane("a", CursorMoved("c", "x=9"), CursorMoved("c", "x=3"))
    assert _rows(store, moves)["consumers"] == [("c", "x=3", 1011, "a", 1)]
    assert _rows(store, moves[:1])["consumers"] == [("c", "x=3", 1011, "a", 1)]
    later = _lane("longer-name", CursorMoved("c", "x=4"), start=1)
    assert _rows(store, later)["consumers"] == [("c", "x=4", 1021, "longer-name", 1)]
    assert _rows(store, moves)["consumers"] == [("c", "x=4", 1021, "longer-name", 1)]


def test_other_kinds_open_no_transaction(store: Store, notes: Any) -> None:
    """Traffic passes by: a batch with nothing for the catalog does not touch the database."""
    catalog = Catalog.of(store.path)
    statements: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        catalog.note_events(notes(5))
        assert statements == []
        catalog.note_events(ADMIN)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert any("INSERT INTO steps" in statement for statement in statements)
