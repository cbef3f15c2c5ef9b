"""Requests come back from the log as they were sent, and long conversations are stored once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook import store
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.redaction.names import is_secret_name

NAMES = itertools.count()
PARTS = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that says Hello."""
    return played()


def as_sent(kind: str, trajectory: Trajectory, turn: Any) -> Any:
    """The body of a request, put together from the log alone."""
    body = dict(turn.requested.request)
    part = PARTS[kind]
    if kind == "completions":
        messages = trajectory.messages(turn)
        if "token_ids" not in messages[0]:
            return body | {part: messages[0]["content"]}
        assert turn.completed is not None
        return body | {part: trajectory.prompt_ids(turn).tolist()}
    if part in body:
        return body
    items = trajectory.items(turn)
    return body | {part: trajectory.messages(turn) if items is None else items}


def _check(proxy: Any, kind: str, name: str, bodies: list[Any]) -> Trajectory:
    proxy.settled()
    trajectory_id = proxy.recorder.known(name).opened.trajectory_id
    trajectory = store.open(proxy.store.path).trajectory(trajectory_id)
    assert trajectory is not None
    turns = list(trajectory.turns.values())
    assert len(turns) == len(bodies)
    for turn, body in zip(turns, bodies, strict=True):
        rebuilt = as_sent(kind, trajectory, turn)
        assert orjson.dumps(rebuilt, option=orjson.OPT_SORT_KEYS) == orjson.dumps(
            body, option=orjson.OPT_SORT_KEYS
        )
        assert turn.requested.wire["endpoint"] == PATHS[kind]
        assert turn.requested.requested_model == body.get("model")
    return trajectory


# What a name calls a secret is kept as a mark alone, which is another test's.
UNKNOWN = st.dictionaries(
    st.text(min_size=1, max_size=6).map("x-".__add__).filter(lambda name: not is_secret_name(name)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text().filter(lambda name: not is_secret_name(name)), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)


@pytest.mark.parametrize("kind", KINDS)
@given(first=UNKNOWN, second=UNKNOWN, model=st.none() | st.text())
@settings(max_examples=40)
def test_fields_nobody_knows_are_kept(
    proxy: InProcess, kind: str, first: Any, second: Any, model: Any
) -> None:
    """Of any form, in the body and inside its messages: the log gives back what was sent, key for key."""
    name = f"w{next(NAMES)}"
    bodies = []
    for unknown in (first, second):
        body = unknown | asked(kind, "Hello é🎉") | {"model": model}
        if kind in ("chat", "messages"):
            body["messages"] = [m | unknown for m in body["messages"]]
        if kind == "responses":
            body["input"] = [{"role": "user", "content": "Hello", **unknown}]
        assert proxy.ask(f"/t/{name}{PATHS[kind]}", body).status == 200
        bodies.append(orjson.loads(orjson.dumps(body)))
    _check(proxy, kind, name, bodies)


def test_what_is_sent_raw_is_kept(proxy: InProcess) -> None:
    """Numbers that read alike stay apart, null is not absence, order within lists is kept."""
    message = b'{"role":"user","content":"a","n":1.0,"m":null}'
    raw = b'{"messages":[' + message + b'],"x":1,"y":1.0,"z":[true,1,"1"],"w":null}'
    assert proxy.ask(f"/t/raw{PATHS['chat']}", raw).status == 200
    assert proxy.ask(f"/t/raw{PATHS['chat']}", raw.replace(b'"n":1.0', b'"n":1')).status == 200
    trajectory = _check(
        proxy, "chat", "raw", [orjson.loads(raw), orjson.loads(raw.replace(b'"n":1.0', b'"n":1'))]
    )
    for turn, number in zip(trajectory.turns.values(), (b"1.0", b"1,"), strict=True):
        assert b'"n":' + number in orjson.dumps(trajectory.messages(turn))


TURNS = 64


def _next(kind: str, body: Any, reply: Any, number: int) -> Any:
    """The request that goes on from a reply, everything said before in it."""
    text = f"question {number}: " + "some words to go on with " * 8
    user = {"role": "user", "content": text}
    match kind:
        case "chat":
            return body | {"messages": [*body["messages"], reply["choices"][0]["message"], user]}
        case "responses":
            return body | {"input": [*body["input"], *reply["output"], user]}
        case "messages":
            message = {"role": "assistant", "content": reply["content"]}
            cached = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            return body | {"messages": [*body["messages"], message, {"role": "user", "content": [cached]}]}
    ids = [*body["prompt"], *reply["choices"][0]["token_ids"], *range(60, 100)]
    return body | {"prompt": ids}


def _size(proxy: Any) -> int:
    proxy.settled()
    files = [p for p in (proxy.store.path).rglob("*") if p.is_file()]
    # Room made ahead is zeros, which hold nothing.
    return sum(len(p.read_bytes().rstrip(b"\0")) for p in files)


@pytest.mark.more_but("chat", "responses")
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_conversation_is_stored_once(played: Callable[..., InProcess], kind: str) -> None:
    """64 turns, each sent with all before it: disk grows with what is new, and every request is there."""
    proxy = played("an answer of a few words")
    body = asked(kind, "begin", instructions="be brief" * 20)
    if kind == "responses":
        body["input"] = [{"role": "user", "content": "begin"}]
    if kind == "completions":
        body |= {"prompt": list(range(40, 80)), "return_token_ids": True}
    bodies, sizes = [], []
    for number in range(TURNS):
        reply = proxy.ask(f"/t/long{PATHS[kind]}", body)
        assert reply.status == 200, reply.data
        bodies.append(body)
        sizes.append(_size(proxy))
        body = _next(kind, body, reply.json, number)
    trajectory = _check(proxy, kind, "long", bodies)
    turns = list(trajectory.turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, *(t.turn_id for t in turns[:-1])]
    early, late = sizes[TURNS // 4] - sizes[0], sizes[-1] - sizes[TURNS - 1 - TURNS // 4]
    assert late < 1.25 * early
    assert sizes[-1] < 8000 * TURNS
