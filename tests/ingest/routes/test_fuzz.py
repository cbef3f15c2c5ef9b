"""Requests drawn from a schema of the whole surface, sound and not: no fault, no hang, and all in the log."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.fakes.clients import streamed
from tests.fakes.clients.openapi_schema import openapi
from tests.fakes.proxies.in_process import InProcess

from rollbook.store.fold.trajectory import Trajectory

OPERATIONS = [
    f"{method.upper()} {path}" for path, methods in openapi()["paths"].items() for method in methods
]
KINDS = {path: kind for kind, path in streamed.PATHS.items()}
STATUSES = {200, 201, 400, 404, 405, 409, 413, 415, 422}
NAMES = itertools.count()


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that says Hello, to bodies that are not too large."""
    return played(max_body_mb=1)


@functools.cache
def _operations() -> dict[str, Any]:
    """Each operation by its name; schemathesis is imported here, since that takes a second."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(openapi())
    every = [result.ok() for result in schema.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in every}


def _raw(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):
        return b"{}"


def _headers(case: Any) -> dict[str, str]:
    """Those that HTTP can carry."""
    headers = {}
    for name, value in dict(case.headers or {}).items():
        text = str(value).replace("\r", " ").replace("\n", " ")
        if name.isascii() and name.replace("-", "").isalnum():
            headers[name] = text.encode("utf-8", "replace").decode("latin-1")
    return headers


def _path(case: Any) -> str:
    query = "&".join(f"{quote(str(k))}={quote(str(v))}" for k, v in dict(case.query or {}).items())
    if case.path == "/v1/events":
        query += "&follow=false"  # a tail that is followed has no end
    return case.formatted_path + (f"?{query}" if query else "")


def _check(proxy: Any, reply: Any, path: str) -> None:
    assert reply.error is None, repr(reply.error)
    assert reply.status in STATUSES, (reply.status, reply.data[:500])
    assert reply.ended
    if reply.status >= 400:
        error = reply.json["error"]
        assert error["code"]
        assert error["message"]
        assert reply.json.get("type", "error") == "error"
        return
    kind = next((k for p, k in KINDS.items() if path.endswith(p)), None)
    if kind is not None:
        _check_recorded(proxy, reply, kind)


def _check_recorded(proxy: Any, reply: Any, kind: str) -> None:
    """What was answered is in the log as it was answered, and is known to have been sent."""
    proxy.settled()
    trajectory = proxy.store.trajectory(reply.headers["x-rollbook-trajectory-id"])
    assert isinstance(trajectory, Trajectory)
    turn_ids = reply.headers["x-rollbook-turn-id"].split(",")
    turns = [trajectory.turns[turn_id] for turn_id in turn_ids]
    for turn in turns:
        assert turn.completed is not None
        assert turn.delivered in ("sent", "echoed")
        assert len(trajectory.prompt_ids(turn)) == turn.completed.prompt_length
    if reply.headers["content-type"].startswith("text/event-stream"):
        usage = bool((turns[0].requested.request.get("stream_options") or {}).get("include_usage"))
        whole = streamed.together(kind, reply.data, usage)
    else:
        whole = reply.json
    assert streamed.text_in(kind, whole) == (turns[0].completed.reply["content"] or "")


@pytest.mark.more_but(
    "POST /v1/chat/completions-*",
    "POST /v1/messages-negative",
    "POST /v1/trajectories/{id}/finish-negative",
    "GET /v1/trajectories/{id}-*",
)
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
@settings(
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
def test_no_request_is_a_fault(proxy: InProcess, name: str, mode: str, data: Any) -> None:
    """Each is answered, or refused in the API's own form; never a 500."""
    from schemathesis import GenerationMode

    case = data.draw(_operations()[name].as_strategy(generation_mode=GenerationMode(mode)))
    method, path = name.split()
    sent = _path(case)
    assume(sent.isascii())
    body = None if case.body.__class__.__name__ == "NotSet" else _raw(case.body)
    reply = proxy.ask(sent, body, headers=_headers(case), method=method)
    _check(proxy, reply, path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in _places(part, (*at, key)))]


@pytest.mark.parametrize("kind", streamed.KINDS)
@given(data=st.data(), value=JSON)
@settings(max_examples=50, database=None, suppress_health_check=list(HealthCheck))
def test_anything_anywhere_in_a_sound_body(proxy: InProcess, kind: str, data: Any, value: Any) -> None:
    """One place of a request that has everything holds any JSON instead."""
    body = json.loads(json.dumps(FULL[kind]))
    place = data.draw(st.sampled_from(_places(body)[1:]), "place")
    target = body
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    path = f"/t/full{next(NAMES)}{streamed.PATHS[kind]}"
    _check(proxy, proxy.ask(path, _raw(body)), streamed.PATHS[kind])


@given(raw=st.binary(max_size=60) | JSON.map(_raw), kind=st.sampled_from(streamed.KINDS))
@settings(max_examples=60, database=None)
def test_any_bytes_get_a_client_error(proxy: InProcess, raw: bytes, kind: str) -> None:
    """JSON that is no request, and what is no JSON."""
    _check(proxy, proxy.ask(streamed.PATHS[kind], raw), streamed.PATHS[kind])


CALL = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": [{"type": "text", "text": "go"}]}
FULL: dict[str, Any] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": "a", "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            USER,
        ],
        "tools": [{"type": "function", "function": {"name": "calc", "parameters": PARAMETERS}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "logit_bias": {"1": 0.5},
        "logprobs": True,
        "n": 2,
        "metadata": {"session_id": "s"},
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.5,
        "seed": 1,
        "max_tokens": 9,
    },
    "completions": {
        "prompt": [1, 2, 3],
        "n": 2,
        "stop": ["x"],
        "logprobs": 1,
        "echo": False,
        "max_tokens": 9,
    },
    "responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
        ],
        "instructions": "s",
        "tools": [{"type": "function", "name": "calc", "parameters": PARAMETERS}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "previous_response_id": None,
        "max_output_tokens": 9,
        "stream": True,
    },
    "messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "calc", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "calc", "description": "d", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": True,
    },
}


@pytest.mark.parametrize("kind", streamed.KINDS)
def test_the_sound_bodies_are_answered(proxy: InProcess, kind: str) -> None:
    """What the tests above change is a request that goes through."""
    reply = proxy.ask(f"/t/sound{streamed.PATHS[kind]}", FULL[kind])
    assert reply.status == 200, reply.data
    _check(proxy, reply, streamed.PATHS[kind])


def test_most_drawn_requests_reach_deep(proxy: InProcess) -> None:
    """The schema is near enough: some of what it draws is answered by every endpoint."""
    before = proxy.trajectories()
    endpoints = {
        t.requested.wire["endpoint"] for trajectory in before.values() for t in trajectory.turns.values()
    }
    assert endpoints == set(streamed.PATHS.values())
