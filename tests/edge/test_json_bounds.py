"""JSON within bounds: how deep it is, what its values take, and how much one call asks for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge import bounds
from rollbook.edge.bounds import MOST_DEPTH, MOST_WEIGHT, check_depth, check_weight
from rollbook.ingest.turns import model_call
from rollbook.store.errors import LimitError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


def _nested(depth: int, value: Any = 1) -> Any:
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _weight(value: Any) -> int:
    """Of one value, by the signs that its text must have."""
    if isinstance(value, dict):
        return 32 + max(len(value) - 1, 0) + sum(2 + _weight(v) for v in value.values())
    if isinstance(value, list):
        return 8 + max(len(value) - 1, 0) + sum(map(_weight, value))
    return 0


@given(VALUES)
def test_a_hundred_levels_of_nesting_pass(value: Any) -> None:
    """What is a hundred deep passes, whatever else it holds; what is one deeper does not."""
    deep = _nested(MOST_DEPTH - _depth(value), value)
    check_depth(deep)
    with pytest.raises(LimitError, match="more than 100 deep") as caught:
        check_depth([deep])
    assert (caught.value.status, caught.value.code) == (400, "json_too_deep")


@given(VALUES, st.integers(1, 64))
def test_weight_is_counted_outside_strings(value: Any, chunk: int) -> None:
    """It is counted outside strings alone, whatever they hold, and wherever the text is cut into chunks."""
    raw = orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounds, "_SMALL", -1)
        patched.setattr(bounds, "_CHUNK", chunk)
        patched.setattr(bounds, "MOST_WEIGHT", _weight(value))
        check_weight(raw)
        patched.setattr(bounds, "MOST_WEIGHT", _weight(value) - 1)
        with pytest.raises(LimitError) as caught:
            check_weight(raw)
    assert (caught.value.status, caught.value.code) == (413, "json_too_large")


def test_what_may_be_large_and_what_may_not() -> None:
    """A million ids and fifty megabytes of text pass; a few megabytes of empty objects do not."""
    check_weight(orjson.dumps({"prompt": list(range(1_000_000))}))
    text = orjson.dumps({"content": '{"a": [1, 2, 3]}, \\ ' * 2_500_000})
    assert len(text) > 50e6
    begun = time.monotonic()
    check_weight(text)
    assert time.monotonic() - begun < 60
    for bomb in (b"[" + b"{}," * MOST_WEIGHT + b"{}]", b"[" + b"[]," * MOST_WEIGHT + b"1]"):
        with pytest.raises(LimitError):
            check_weight(bomb)


# At the HTTP edge -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy for bodies of two megabytes."""
    return played(max_body_mb=2)


def _refused(proxy: Any, path: str, body: Any) -> tuple[int, str]:
    reply = proxy.ask(path, json.dumps(body).encode())
    assert reply.error is None
    return reply.status, reply.json["error"]["code"]


PLACES: list[dict[str, Any]] = [
    {"metadata": {"x": _nested(200)}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": _nested(200)}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": _nested(200)}}},
    {"chat_template_kwargs": {"x": _nested(200)}},
    {"unknown": _nested(900)},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: next(iter(place)))
def test_what_is_nested_too_deep_is_a_400(proxy: InProcess, kind: str, place: dict[str, Any]) -> None:
    """Wherever it stands, through every endpoint; nothing behind is asked to recurse so far."""
    assert _refused(proxy, PATHS[kind], asked(kind, "x") | place) == (400, "json_too_deep")


def test_as_deep_as_may_be(proxy: InProcess) -> None:
    """It is answered and recorded: what is written around it in an event fits, too."""
    body = asked("chat", "deep", metadata={"x": _nested(MOST_DEPTH - 2)})
    assert proxy.ask(f"/t/deep{PATHS['chat']}", body).status == 200
    [turn] = proxy.trajectories()["deep"].turns.values()
    assert turn.requested.request["metadata"] == body["metadata"]
    assert turn.completed is not None


ROUTES = ["/v1/trajectories", *(f"/v1/trajectories/x/{rest}" for rest in ("finish", "labels", "launches"))]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages/count_tokens"])
def test_other_routes_have_the_same_bounds(proxy: InProcess, path: str) -> None:
    """Depth and weight."""
    assert _refused(proxy, path, {"labels": _nested(200)}) == (400, "json_too_deep")
    assert _refused(proxy, path, {"labels": [{}] * 70_000}) == (413, "json_too_large")


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("asks", "code", "text"),
    [
        ({"n": 128, "user": "x" * 20_000}, "n_too_large", "104 completions|10[0-9] completions"),
        ({"tools": [FUNCTION] * 1100}, "field_too_large", "tools holds 1100"),
        ({"stop": ["x"] * 65}, "field_too_large", "stop holds 65"),
        ({"stop": ["x" * 1500, "y" * 1500]}, "field_too_large", "stop, in characters, holds 3000"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "field_too_large", "logit_bias holds 5000"),
        ({"chat_template_kwargs": {f"k{i}": 1 for i in range(70)}}, "field_too_large", "kwargs holds 70"),
        ({"chat_template_kwargs": {"k": "x" * 70_000}}, "field_too_large", "bytes of JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 300_000}}}},
            "field_too_large",
            "response_format holds",
        ),
        ({"temperature": 1e300}, "bad_request", "temperature"),
        ({"max_tokens": 2**40}, "bad_request", "max_tokens"),
        ({"max_tokens": 10**30}, "bad_request", "max_tokens"),
        ({"top_k": 2**40}, "bad_request", "top_k"),
        ({"logit_bias": {"1": 1e300}}, "bad_request", "logit_bias"),
        ({"seed": 2**70}, "bad_request", "seed"),
    ],
)
def test_one_call_asks_for_so_much(proxy: InProcess, asks: dict[str, Any], code: str, text: str) -> None:
    """More is a 400 that names the field and what it may hold."""
    reply = proxy.ask(f"/t/much{PATHS['chat']}", json.dumps(asked("chat", "x", **asks)).encode())
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert re.search(text, reply.json["error"]["message"])


def test_what_is_beside_the_conversation(played: Callable[..., InProcess]) -> None:
    """Two megabytes of it are searched for secrets, more are refused; a conversation may be larger."""
    proxy = played(max_body_mb=8)
    text = "word " * 600_000
    tool = FUNCTION | {"headers": {"x": text}}
    for asks in ({"user": text}, {"metadata": {"a": {"b": text}}}, {"tools": [tool]}):
        assert _refused(proxy, "/t/beside" + PATHS["chat"], asked("chat", "x", **asks)) == (
            413,
            "fields_too_large",
        )
    described = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    refused = _refused(proxy, "/t/beside" + PATHS["chat"], asked("chat", "x", tools=[described]))
    assert refused == (400, "context_length_exceeded")


def test_too_many_messages(proxy: InProcess) -> None:
    """Ten thousand pass, as far as the context goes; one more does not."""
    messages = [{"role": "user", "content": "x"}] * (model_call.MOST_MESSAGES + 1)
    assert _refused(proxy, "/t/many/v1/chat/completions", {"messages": messages}) == (400, "field_too_large")


def test_siblings_of_what_is_small(proxy: InProcess) -> None:
    """128 completions of a small request are served."""
    reply = proxy.ask(f"/t/siblings{PATHS['chat']}", asked("chat", "x", n=128))
    assert reply.status == 200
    assert len(reply.json["choices"]) == 128


@pytest.mark.parametrize(
    "body",
    [
        {"id": "a", "group": "g" * 2000},
        {"id": "a", "task": "t" * 70_000},
        {"id": "a", "labels": {str(i): 1 for i in range(300)}},
    ],
)
def test_names_are_bounded(proxy: InProcess, body: Any) -> None:
    """A group, a task, a trajectory's labels."""
    assert _refused(proxy, "/v1/trajectories", body) == (400, "bad_request")


def test_text_far_beyond_the_context_is_refused_from_its_beginning(proxy: InProcess) -> None:
    """Before ids of all of it are made, through every way in; the loop goes on meanwhile."""
    text = "hello world " * 160_000
    begun = time.monotonic()
    for path, body in (
        (PATHS["chat"], asked("chat", text)),
        ("/t/named" + PATHS["chat"], asked("chat", text)),
        (PATHS["completions"], asked("completions", text)),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ):
        assert _refused(proxy, path, body) == (400, "context_length_exceeded")
    assert time.monotonic() - begun < 60
