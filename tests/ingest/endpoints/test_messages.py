"""Anthropic's messages: the same turns as through chat completions, in blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS, message
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

PATH = PATHS["messages"]
NAMES = itertools.count()
CALL = '<tool_call>\n{{"name": "calc", "arguments": {{"b": {}, "a": 1.0}}}}\n</tool_call>'
TOOL = {"name": "calc", "description": "adds", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that says Hello."""
    proxy.engine.answer = lambda *_: "Hello"


@pytest.fixture
def name() -> str:
    """A trajectory's name that no other test uses."""
    return f"m{next(NAMES)}"


def _user(content: Any) -> Any:
    return {"role": "user", "content": content}


def _ask(proxy: Any, name: str, messages: list[Any], answer: Any = None, **fields: Any) -> Any:
    if answer is not None:
        proxy.engine.answer = lambda *_: answer
    reply = proxy.ask(f"/t/{name}{PATH}", {"messages": messages, "max_tokens": 500} | fields)
    assert reply.status == 200, reply.data
    return message(reply.data) if fields.get("stream") else reply.json


def _prompt(proxy: Any) -> str:
    return str(proxy.engine.tokenizer.decode(proxy.engine.prompts[-1].ids, special=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_holds_thinking_text_and_tool_uses(proxy: Any, name: str, stream: bool) -> None:
    """Thinking with a signature, text, tool uses with their input as an object; usage and stop reason."""
    text = "<think>hm</think>\n\nLet me see. " + CALL.format(2) + "\n" + CALL.format(3)
    reply = _ask(proxy, name, [_user("go")], text, tools=[TOOL], stream=stream, model="claude-x")
    (turn,) = proxy.trajectories()[name].turns.values()
    at = turn.turn_id
    assert reply == {
        "id": f"msg_{at}",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": at},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": f"call-{at}-0", "name": "calc", "input": {"b": 2, "a": 1.0}},
            {"type": "tool_use", "id": f"call-{at}-1", "name": "calc", "input": {"b": 3, "a": 1.0}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": turn.completed.prompt_length,
            "output_tokens": len(turn.completed.completion_ids),
        },
    }
    assert turn.completed.reply["tool_calls"][0]["function"]["arguments"] == '{"b": 2, "a": 1.0}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("play", "fields", "reason", "sequence"),
    [
        ("Hi", {}, "end_turn", None),
        (Play("Hi", "length", ends=False), {}, "max_tokens", None),
        ("one STOP two", {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        ("one STOP two", {"stop_sequences": ["never", "STOP"]}, "stop_sequence", None),
        ("Hi", {"stop_sequences": ["STOP"]}, "end_turn", None),
    ],
)
def test_the_stop_reason_is_in_anthropics_words(
    proxy: InProcess, name: str, play: Any, fields: Any, reason: str, sequence: Any, stream: bool
) -> None:
    """Stop reasons have Anthropic's names; which stop sequence matched is not recorded."""
    reply = _ask(proxy, name, [_user("go")], play, stream=stream, **fields)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    if "STOP" in str(play):
        assert reply["content"] == [{"type": "text", "text": "Hi" if play == "Hi" else "one "}]


def test_a_conversation_is_one_path(proxy: InProcess, name: str) -> None:
    """Blocks echoed as Anthropic's clients do: thinking with its signature, tool results with their ids."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [_user([{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}])]
    fields = {"system": system, "tools": [TOOL]}
    first = _ask(
        proxy, name, messages, "<think>a</think>\n\n" + CALL.format(2) + "\n" + CALL.format(3), **fields
    )
    uses = [b for b in first["content"] if b["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "3"},
        {
            "type": "tool_result",
            "tool_use_id": uses[1]["id"],
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "go on"},
    ]
    messages += [{"role": "assistant", "content": first["content"]}, _user(results)]
    second = _ask(proxy, name, messages, "<think>b</think>\n\nIt is 3.", **fields)
    messages += [{"role": "assistant", "content": second["content"]}, _user("thanks")]
    _ask(proxy, name, messages, "Bye.", **fields)
    trajectory = proxy.trajectories()[name]
    turns = list(trajectory.turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert [m["role"] for m in trajectory.messages(turns[2])] == [
        *("system", "user", "assistant", "tool", "tool", "user", "assistant", "user")
    ]
    tool = trajectory.messages(turns[2])[4]
    assert tool == {"role": "tool", "tool_call_id": uses[1]["id"], "content": "no", "is_error": True}
    whole = proxy.engine.tokenizer.decode(trajectory.prompt_ids(turns[2]), special=True)
    for text in ("Be brief.", "<think>a</think>", "<think>b</think>", "It is 3.", "go on", "thanks"):
        assert whole.count(text) == 1, text
    assert trajectory.items(turns[2]) == messages
    assert turns[2].requested.request == fields | {"max_tokens": 500}


def test_the_same_conversation_makes_the_same_turns(proxy: InProcess, name: str) -> None:
    """Begun through one API and gone on with through the others: one path, the same ids."""
    proxy.engine.answer = lambda *_: "Hello"
    _ask(proxy, name, [_user("a")], system="s")
    reply = {"role": "assistant", "content": "Hello"}
    chat = [{"role": "system", "content": "s"}, _user("a"), reply, _user("b")]
    assert proxy.ask(f"/t/{name}{PATHS['chat']}", {"messages": chat}).status == 200
    items = [_user("a"), reply, _user("b"), reply, _user("c")]
    assert proxy.ask(f"/t/{name}{PATHS['responses']}", {"input": items, "instructions": "s"}).status == 200
    turns = list(proxy.trajectories()[name].turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert [t.requested.wire["endpoint"] for t in turns] == [PATH, PATHS["chat"], PATHS["responses"]]


@pytest.mark.parametrize(
    "system",
    [None, "", "Be brief.", [], [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]],
)
def test_system_in_each_form(proxy: InProcess, name: str, system: Any) -> None:
    """A text, blocks of text, or nothing."""
    _ask(proxy, name, [_user("go")], system=system)
    assert ("system\nBe brief.<|im_end|>" in _prompt(proxy)) == bool(system)


def test_thinking_that_cannot_be_read_is_dropped(proxy: InProcess, name: str) -> None:
    """Redacted thinking holds nothing for this model; the rest is said."""
    reply = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "yes"}],
    }
    _ask(proxy, name, [_user("a"), reply, _user("b")])
    assert "yes" in _prompt(proxy)
    assert "xyz" not in _prompt(proxy)


@pytest.mark.parametrize(
    ("choice", "honoured", "calls"),
    [
        ({"type": "auto"}, True, True),
        ({"type": "none"}, True, False),
        ({"type": "any"}, False, True),
        ({"type": "tool", "name": "calc"}, False, True),
        ({"type": ["odd"]}, False, True),
    ],
)
def test_a_tool_choice_that_cannot_be_forced_is_reported(
    proxy: InProcess, name: str, choice: Any, honoured: bool, calls: bool
) -> None:
    """What cannot be forced is told; with none, calls are not read."""
    proxy.engine.answer = lambda *_: CALL.format(1)
    body = {"messages": [_user("go")], "max_tokens": 99, "tools": [TOOL], "tool_choice": choice}
    reply = proxy.ask(f"/t/{name}{PATH}", body)
    assert ("x-rollbook-not-honoured" not in reply.headers) == honoured
    assert (reply.json["stop_reason"] == "tool_use") == calls


def test_ignored_fields_are_listed_in_a_header(proxy: InProcess, name: str) -> None:
    """Server tools, thinking budgets, containers."""
    body = {
        "messages": [_user("go")],
        "max_tokens": 99,
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "container": "c",
    }
    reply = proxy.ask(f"/t/{name}{PATH}", body)
    ignored = reply.headers["x-rollbook-not-honoured"]
    assert ignored == "container,thinking,tools.web_search_20250305"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": None}, "bad_request"),
        ({"max_tokens": 0}, "bad_request"),
        ({"messages": None}, "bad_request"),
        ({"messages": []}, "empty_messages"),
        ({"messages": ["x"]}, "unknown_role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}]}, "bad_request"),
        ({"messages": [{"role": "user", "content": [5]}]}, "bad_request"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content_not_served"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}]}, "bad_request"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "odd"}]},
                    {"role": "user", "content": "x"},
                ]
            },
            "content_not_served",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "nothing_to_answer",
        ),
        ({"system": 5}, "bad_request"),
        ({"tools": [{}]}, "bad_request"),
        ({"tools": {}}, None),
    ],
)
def test_an_invalid_request_is_a_400_in_anthropics_form(
    proxy: InProcess, name: str, fields: Any, code: Any
) -> None:
    """type error, a kind of Anthropic's, and our code; nothing is recorded."""
    reply = proxy.ask(f"/t/{name}{PATH}", {"messages": [_user("x")], "max_tokens": 9} | fields)
    if code is None:
        assert reply.status == 200
        return
    assert reply.status == 400, reply.data
    error = reply.json
    assert (error["type"], error["error"]["type"], error["error"]["code"]) == (
        "error",
        "invalid_request_error",
        code,
    )
    assert set(error["error"]) == {"type", "message", "code"}
    assert name not in proxy.trajectories()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_kinds(status: int, kind: str) -> None:
    """By their status, as Anthropic's documents have them."""
    from rollbook.ingest.endpoints import messages

    assert messages.API.error(status, "c", "m")["error"]["type"] == kind


def test_tokens_are_counted_as_they_are_sent(proxy: InProcess, name: str) -> None:
    """count_tokens says what the request's usage will; nothing is recorded of it."""
    body = {"messages": [_user("count me")], "system": "s", "tools": [TOOL]}
    counted = proxy.ask(f"/t/{name}{PATH}/count_tokens", body)
    assert (counted.status, set(counted.json)) == (200, {"input_tokens"})
    assert name not in proxy.trajectories()
    reply = _ask(proxy, name, body["messages"], system="s", tools=[TOOL])
    assert reply["usage"]["input_tokens"] == counted.json["input_tokens"]
    bad = proxy.ask(f"{PATH}/count_tokens", {"messages": []})
    assert (bad.status, bad.json["error"]["type"]) == (400, "invalid_request_error")
