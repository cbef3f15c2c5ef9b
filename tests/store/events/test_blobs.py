"""Bodies: any JSON comes back the same through references, and what looks like one is data."""

from __future__ import annotations

import gc
import hashlib
import weakref
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rollbook.store.events.blobs import KEY, externalize, resolve

KEYS = st.text(max_size=3) | st.just(KEY)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


class Stored(dict[str, Any]):
    """Where bodies go; a plain dict takes no weak reference."""


def _apart(value: Any, threshold: int) -> tuple[Any, dict[str, Any]]:
    bodies: dict[str, Any] = {}
    return externalize(value, threshold, bodies.__setitem__), bodies


@given(value=JSON, threshold=st.integers(0, 40))
def test_values_come_back(value: Any, threshold: int) -> None:
    """Whatever is stored apart, resolving gives the value again; digests are of the bodies' JSON."""
    small, bodies = _apart(value, threshold)
    assert resolve(small, bodies.__getitem__) == value
    assert all(hashlib.sha256(orjson.dumps(b)).hexdigest() == d for d, b in bodies.items())


@given(value=JSON)
def test_nothing_small_is_stored_apart(value: Any) -> None:
    """Below the threshold, only objects that look like references are."""
    small, bodies = _apart(value, 10_000)
    if f'"{KEY}":' not in orjson.dumps(value).decode():
        assert (small, bodies) == (value, {})


def test_what_is_stored_apart() -> None:
    """Long text wherever it is; large entries of the top level as a whole; each body once."""
    long = "x" * 50
    tool = {"enum": [f"{i}" for i in range(30)]}
    value = {"a": {"deep": [long, "short"]}, "tools": [tool, tool], "b": long}
    small, bodies = _apart(value, 40)
    text, whole = (hashlib.sha256(orjson.dumps(v)).hexdigest() for v in (long, [tool, tool]))
    # The entry `a` is small only in text: with the reference in it, it is longer than the threshold.
    assert small["b"] == {KEY: text}
    assert small["tools"] == {KEY: whole}
    assert bodies[text] == long
    assert bodies[whole] == [tool, tool]
    assert resolve(small, bodies.__getitem__) == value


def test_a_reference_of_a_client_is_a_body() -> None:
    """An object with the reserved key is stored apart though it is small, so it cannot name another body."""
    small, bodies = _apart([{KEY: "mine"}, {"x": {KEY: 1, "y": 2}}], 10_000)
    assert sorted(bodies.values(), key=str) == [{KEY: "mine"}, {KEY: 1, "y": 2}]
    assert small[1] == {"x": {KEY: hashlib.sha256(b'{"$body":1,"y":2}').hexdigest()}}


def test_what_was_stored_is_freed_at_once() -> None:
    """No circle is made that would hold the bodies until a collection."""
    stored = Stored()
    freed = weakref.ref(stored)
    gc.disable()
    try:
        externalize({"messages": [{"content": ["x" * 1000]}]}, 100, stored.__setitem__)
        assert stored
        del stored
        assert freed() is None
    finally:
        gc.enable()
