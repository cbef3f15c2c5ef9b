"""A request for several completions, stored once: what is left out comes back exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories.golden import digest_of

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import TurnRequested
from rollbook.store.events.event_json import from_json
from rollbook.store.fold.siblings import as_sibling, whole

PINNED = "649e97a923bebd6e"
"""The beginning of the sha256 of the golden store's files: they are never changed."""

SCALARS = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.0, 1.0, 2.5]) | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
KEYS = st.sampled_from(["a", "b", "seed", "choice", "items", "shared_items", "digest"])
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)


def _turn(turn_id: str, *objects: Any) -> TurnRequested:
    request, sampling, honoured, wire = objects
    place = (None, "first_turn", None, 0)
    return TurnRequested("t", turn_id, "r", *place, [], request, "m", sampling, honoured, "key", wire)


@given(st.tuples(OBJECTS, OBJECTS, OBJECTS, OBJECTS), st.tuples(OBJECTS, OBJECTS, OBJECTS, OBJECTS))
def test_what_is_left_out_comes_back(first: Any, own: Any) -> None:
    """Whatever the two say: the same JSON, byte for byte but for the order of keys."""
    base, other = _turn("u1", *first), _turn("u2", *own)
    stored = as_sibling(other, base)
    read = stored if stored.sibling_of is None else whole(stored, base)
    names = ("request", "sampling", "honoured", "wire")
    for name in names:
        options = orjson.OPT_SORT_KEYS
        assert orjson.dumps(getattr(read, name), option=options) == orjson.dumps(
            getattr(other, name), option=options
        )
    nothing: Any = {name: {} for name in names}
    assert replace(read, **nothing) == replace(other, **nothing)


@given(OBJECTS, OBJECTS)
def test_a_sibling_that_differs_in_its_seed_holds_nothing_else(request: Any, honoured: Any) -> None:
    """Its request, the fields that are not honoured and how it came in are the first one's."""
    wire = {"endpoint": "/v1/responses", "digest": "d", "items": [1], "shared_items": 0}
    first = _turn("u1", request, {"seed": 1, "temperature": 1.0}, honoured, wire)
    second = _turn(
        "u2",
        dict(request),
        {"seed": 2, "temperature": 1.0},
        dict(honoured),
        wire | {"choice": 1, "items": [], "shared_items": 1},
    )
    stored = as_sibling(second, first)
    assert stored.sibling_of == "u1"
    assert (stored.request, stored.honoured, stored.sampling) == ({}, {}, {"seed": 2})
    assert stored.wire == {"choice": 1, "items": [], "shared_items": 1}


def test_numbers_of_another_type_are_kept() -> None:
    """True, 1 and 1.0 are equal in Python, and three values in JSON."""
    first = _turn("u1", {"a": 1, "b": [True]}, {}, {}, {})
    stored = as_sibling(_turn("u2", {"a": 1.0, "b": [1]}, {}, {}, {}), first)
    assert orjson.dumps(stored.request) == b'{"a":1.0,"b":[1]}'


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-siblings", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-siblings") == PINNED


def test_golden_siblings_have_asked_all_that_their_first_turn_did(
    golden: Store, root: Path, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """Out of a sealed unit and a segment, of two endpoints, and of a turn that was asked elsewhere."""
    lines = (root / "tests" / "data" / "format-1-siblings.jsonl").read_text().splitlines()
    assert [plain(e) for e in golden.events()] == [plain(from_json(orjson.loads(line))) for line in lines]
    trajectory = golden.trajectory("t1")
    assert trajectory is not None
    requested = {name: turn.requested for name, turn in trajectory.turns.items()}
    assert [turn.sampling["seed"] for turn in requested.values()] == [7, 8, 9, 7, 8, 8]
    assert all(requested[name].request["n"] == 3 for name in ("u1", "u2", "u3"))
    assert all(requested[name].request == {"store": True} for name in ("u4", "u5", "u6"))
    assert all(turn.honoured == {"user_tag": False} for turn in requested.values())
    assert requested["u3"].wire == {"digest": "d1", "choice": 2}
    messages = {name: trajectory.messages(turn) for name, turn in trajectory.turns.items()}
    assert messages["u1"] == messages["u2"] == messages["u3"] == [{"role": "user", "content": "u1?"}]
    u4, u5, u6 = (trajectory.items(trajectory.turns[name]) for name in ("u4", "u5", "u6"))
    assert u4 == u5 == u6 == [{"role": "user"}]
    with rb.connect(golden.path) as connection:
        rows = connection.execute(
            "SELECT turn_id, endpoint, choice, request, sampling FROM turns ORDER BY turn_id"
        ).fetchall()
    assert [row[1:3] for row in rows] == [("/v1/chat/completions", i) for i in range(3)] + [
        ("/v1/responses", 0),
        ("/v1/responses", 1),
        ("/v1/responses", 1),
    ]
    assert {row[3] for row in rows[3:]} == {'{"store":true}'}
    assert [orjson.loads(row[4])["seed"] for row in rows] == [7, 8, 9, 7, 8, 8]
