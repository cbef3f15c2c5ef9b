"""docs/sql.md says what the views are, and its queries answer the questions above them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_sql import render

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.sql.sandbox import Connection
from rollbook.store.sql.views import VIEWS, View
from rollbook.viewer.examples import EXAMPLES, Example


def test_the_page_is_the_rendered_one(root: Path) -> None:
    """docs/sql.md is generated, never edited."""
    page = (root / "docs" / "sql.md").read_text()
    assert page == render(), "docs/sql.md is old: run python docs/render/page_sql.py > docs/sql.md"


def test_the_page_shows_every_view_and_question() -> None:
    """Each view has its table and each example its block."""
    page = render()
    assert all(f"### `{view.name}`\n" in page for view in VIEWS)
    assert all(f"### {e.question}\n" in page and e.sql in page for e in EXAMPLES)
    assert len({e.question for e in EXAMPLES}) == len(EXAMPLES) >= 20


@pytest.fixture(scope="module")
def full(one_of_everything: Store) -> Iterator[Connection]:
    """A connection over a store with one of everything."""
    with rb.connect(one_of_everything.path) as connection:
        yield connection


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A connection over a store without events, whose views are made once."""
    store = rb.open(tmp_path_factory.mktemp("empty") / "store", create=True)
    with rb.connect(store.path) as connection:
        yield connection


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.name)
def test_documented_columns_are_the_views_own(empty: Connection, view: View) -> None:
    """Names, order and types are what DuckDB says, already on an empty store; each has a meaning."""
    described = empty.execute(f'DESCRIBE "{view.name}"').fetchall()
    assert [(c.name, c.type) for c in view.columns] == [(row[0], row[1]) for row in described]
    assert all(c.doc for c in view.columns)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.question)
def test_each_question_has_an_answer(full: Connection, example: Example) -> None:
    """The query runs on a store with one of everything, and gives rows."""
    assert full.execute(example.sql).fetchall()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.question)
def test_each_question_may_be_asked_of_an_empty_store(empty: Connection, example: Example) -> None:
    """The query gives no rows, and no error, before the first event."""
    assert empty.execute(example.sql).fetchall() == []


def _answer(connection: Connection, question: str) -> list[Any]:
    [example] = [e for e in EXAMPLES if question in e.question]
    return connection.execute(example.sql).fetchall()


def test_computed_answers_are_right(one_of_everything: Store) -> None:
    """Where a query does more than look up, its numbers are right."""
    ask = rb.connect(one_of_everything.path)
    assert _answer(ask, "reward move") == [
        ("actor", 0, 3, pytest.approx(2 / 3), pytest.approx(2 / 3)),
        ("actor", 1, 1, 1.0, 1.0),
    ]
    unlikely = [("task-1-0", f"task-1-0-{n}", 1, 4, " 4", -12.0, 0) for n in (1, 2)]
    assert sorted(_answer(ask, "very unlikely")) == unlikely
    assert [row[1] for row in _answer(ask, "perhaps never get")] == ["task-2-0-2"]
    assert _answer(ask, "How stale") == [("demo", "actor", 0, 2, 0.0, 0), ("demo", "actor", 1, 1, 0.0, 0)]
    assert _answer(ask, "Which step trained") == [("task-1-0", 0, 0, "task-1-0-2")]
    assert [row[:2] for row in _answer(ask, "did this step")] == [(0, "task-1-0"), (1, "task-1-1")]
    assert _answer(ask, "tokens did each version") == [("demo", 0, 12, 8), ("demo", 1, 4, 4)]
    groups = _answer(ask, "teach nothing")
    assert [(row[0], row[2], row[4] == 0) for row in groups] == [("task-2", 2, True), ("task-1", 2, False)]
    lineage = _answer(ask, "weights come from")
    assert [(row[1], row[2], row[7]) for row in lineage] == [(2, 1, "w2"), (1, 0, "w1"), (0, None, "w0")]
    assert [row[:6] for row in _answer(ask, "every sampled token go")] == [
        ("demo", 0, "trained", None, 4, 8),
        ("demo", 0, "dropped", "staleness", 1, 2),
        ("demo", 0, "kept out", "undelivered", 1, 2),
        ("demo", 1, "trained", None, 2, 4),
    ]
    turns = [(row[1], row[3], row[4]) for row in _answer(ask, "turns made this step")]
    assert turns == [(i, f"task-1-{i}-{n}", n == 2) for i in (0, 1) for n in (1, 2)]
    assert _answer(ask, "long are the sequences") == [(2, 4, 7.0, 7, pytest.approx(4 / 7))]
    assert [row[3] for row in _answer(ask, "weight transfers")] == ["finished", "failed"]
    assert _answer(ask, "large requests") == [("d1", 20, 1, '"a long system prompt"')]
    assert _answer(ask, "upstream charge") == [("m", 2, 7, 4)]
    assert [(row[0], *row[2:]) for row in _answer(ask, "infrastructure fail")] == [("nightly", 2, 0.5)]
    assert [row[0::3] for row in _answer(ask, "entropy")] == [(0, -12.0), (1, -0.5)]
    ask.close()
