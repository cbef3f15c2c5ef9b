"""The trajectory that a head names is the one that the whole request names, unless its body says more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rollbook.edge.keys import sent_key
from rollbook.ingest.cluster.siblings import moves_cursor, named_by_head
from rollbook.ingest.trajectories.identity import identify, split_path
from rollbook.store.errors import RequestError

NAMING = ("x-rollbook-trajectory", "x-relax-trajectory-id")
NAMES = st.sampled_from(["a", "org/repo", "ü", "a b", "trajectory:x", "", "x" * 300])
HEADERS = st.sampled_from(
    [*NAMING, "authorization", "x-api-key", "x-session-id", "x-litellm-session-id", "accept"]
)
PATHS = st.sampled_from(
    [
        "/v1/chat/completions",
        "/t/a/v1/chat/completions",
        "/t/org%2Frepo/v1/responses",
        "/t/b/group/g/v1/messages",
        "/t//v1/messages",
        "/t/x",
    ]
)


def _value(header: str, name: str) -> bytes:
    text = f"Bearer trajectory:{name}" if header == "authorization" else name
    return (f"trajectory:{name}" if header == "x-api-key" else text).encode()


@given(PATHS, st.lists(st.tuples(HEADERS, NAMES), max_size=4))
def test_it_is_what_the_request_names(path: str, given_headers: list[tuple[str, str]]) -> None:
    """The same name by the same precedence; where the request is refused, any answer does."""
    raw = [(header.encode(), _value(header, name)) for header, name in given_headers]
    named, is_hint = named_by_head("POST", path, raw, NAMING)
    headers = Headers(raw=raw)
    try:
        fields, _ = split_path(path)
        identity = identify(fields, headers, {}, sent_key(headers), NAMING)
    except RequestError:
        return
    assert named == identity.name
    assert named is None or is_hint == (identity.by == "hint")


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/trajectories/a/finish", "a"),
        ("POST", "/v1/trajectories/org%2Frepo/7/rewards", "org/repo/7"),
        ("POST", "/v1/trajectories/a/labels", "a"),
        ("POST", "/v1/trajectories/a/launches", "a"),
        ("POST", "/v1/trajectories/a/b/launches/l1/end", "a/b"),
        ("POST", "/v1/trajectories/a/launches/l1/leaks", "a"),
        ("POST", "/v1/trajectories", None),
        ("GET", "/v1/trajectories/a/finish", "a/finish"),
        ("GET", "/healthz", None),
    ],
)
def test_routes_about_a_trajectory(method: str, path: str, name: Any) -> None:
    """Their path names it; others name none."""
    assert named_by_head(method, path, [], NAMING)[0] == name


def test_cursors() -> None:
    """They are moved by one worker, and read by any."""
    assert moves_cursor("PUT", "/v1/cursors/x")
    assert not moves_cursor("GET", "/v1/cursors/x")
