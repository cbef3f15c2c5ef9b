"""Which requests count as the same: for every conversation, whatever a client does to it by chance."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.cassettes.tape import BY_CHANCE, ComparedRequest, differs, read_request
from rollbook.ingest.endpoints.api import no_history
from rollbook.ingest.endpoints.registry import APIS

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(TEXTS, st.integers(-9, 9) | TEXTS | st.booleans(), max_size=3)
CALLS = st.lists(st.tuples(TEXTS, ARGUMENTS), min_size=1, max_size=2)
SAID = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS}) | CALLS.map(
    lambda calls: {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"c{place}",
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps(arguments).decode()},
            }
            for place, (name, arguments) in enumerate(calls)
        ],
    }
)
OTHERS = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXTS}) | TEXTS.map(
    lambda text: {"role": "tool", "tool_call_id": "c0", "content": text}
)
TOOLS = st.lists(
    TEXTS.map(
        lambda name: {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    ),
    max_size=2,
)
BODIES = st.fixed_dictionaries(
    {
        "model": TEXTS,
        "messages": st.lists(SAID | OTHERS, max_size=5).map(
            lambda m: [*m, {"role": "user", "content": "go"}]
        ),
        "tools": TOOLS,
        "temperature": st.sampled_from([0, 0.5, 1.0]),
        "max_tokens": st.integers(1, 99),
    }
)


def _read(body: Any, path: str = CHAT) -> ComparedRequest:
    return read_request(APIS[path], body, no_history)


def _same(first: Any, other: Any) -> bool:
    a, b = _read(first), _read(other)
    return a.digest == b.digest and not differs(a, b)


def _rewritten(value: Any) -> Any:
    """The same JSON with its keys in another order, and integral numbers as floats."""
    if isinstance(value, dict):
        return {k: _rewritten(v) for k, v in reversed(value.items())}
    if isinstance(value, list):
        return [_rewritten(v) for v in value]
    return float(value) if type(value) is int else value


def _by_chance(body: Any, data: st.DataObject) -> Any:
    """A body as another client, or the same on another day, would send it."""
    other = copy.deepcopy(body)
    for message in other["messages"]:
        for call in message.get("tool_calls", ()):
            call["id"] = data.draw(TEXTS)
            call["index"] = 0
            written = _rewritten(orjson.loads(call["function"]["arguments"]))
            call["function"]["arguments"] = orjson.dumps(written, option=orjson.OPT_INDENT_2).decode()
        if "tool_call_id" in message:
            message["tool_call_id"] = data.draw(TEXTS)
        if isinstance(message["content"], str) and data.draw(st.booleans()):
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "system" and data.draw(st.booleans()):
            message["role"] = "developer"
        message["annotations"] = None
    added = dict.fromkeys(BY_CHANCE - {"stream", "stream_options", "metadata", "logprobs"}, "x")
    return (
        _rewritten(other)
        | added
        | {"stream": data.draw(st.booleans()), "seed": None, "max_tokens": body["max_tokens"]}
    )


@given(BODIES, st.data())
def test_what_clients_do_by_chance_changes_nothing(body: Any, data: st.DataObject) -> None:
    """Ids, forms of JSON and content, and fields that decide nothing."""
    assert _same(body, _by_chance(body, data))


@given(BODIES, st.data())
def test_what_decides_is_seen(body: Any, data: st.DataObject) -> None:
    """Any message that is changed, added or left out, any tool, any parameter, known or not."""
    other = copy.deepcopy(body)
    place = data.draw(st.integers(0, len(body["messages"]) - 1))
    message = other["messages"][place]
    match data.draw(
        st.sampled_from(["text", "role", "added", "tool", "temperature", "unknown", "model", "call"])
    ):
        case "text":
            message["content"] = (message["content"] or "") + "!"
        case "role":
            message["role"] = "tool" if message["role"] != "tool" else "user"
            message.pop("tool_calls", None)
        case "added":
            other["messages"].insert(place, {"role": "user", "content": ""})
        case "tool":
            other["tools"].append({"type": "web_search"})
        case "temperature":
            other["temperature"] = 1.5
        case "unknown":
            other["a_field_of_a_vendor"] = False
        case "model":
            other["model"] += "-next"
        case "call":
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            other["messages"].insert(place, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert not _same(body, other)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, max_size=2))
def test_the_apis_agree(texts: list[str], names: list[str]) -> None:
    """A conversation of text is the same through chat completions, messages and Responses."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)] + [
        {"role": "user", "content": "go"}
    ]
    functions = [{"name": name, "parameters": {"type": "object"}} for name in names]
    bodies = {
        CHAT: {"messages": [{"role": "system", "content": "s"}, *messages], "seed": 3}
        | {"tools": [{"type": "function", "function": f} for f in functions]},
        MESSAGES: {"system": "s", "messages": messages, "max_tokens": 5}
        | {"tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]},
        "/v1/responses": {"instructions": "s", "input": messages}
        | {"tools": [{"type": "function"} | f for f in functions]},
    }
    first, *others = [_read({"model": "m"} | body, path) for path, body in bodies.items()]
    assert all(o.digest == first.digest and not differs(o, first) for o in others)


@pytest.mark.parametrize(
    ("path", "body", "changed"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": "a"}]}]}, "b"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document", "data": "a"}]}]}, "b"),
        ("/v1/responses", {"input": [{"type": "mcp_output", "output": "a"}]}, "b"),
        ("/v1/completions", {"prompt": "a"}, "b"),
        ("/v1/completions", {"prompt": ["a", "x"]}, "b"),
        ("/v1/completions", {"prompt": [1, 2, 3]}, [1, 2, 4]),
    ],
)
def test_what_no_reader_of_ours_knows_is_compared(path: str, body: Any, changed: Any) -> None:
    """Content of kinds that only an upstream takes counts, and so does a raw prompt."""
    text = orjson.dumps(body)
    if isinstance(changed, list):
        other: Any = {"prompt": changed}
    else:
        other = orjson.loads(text.replace(b'"a"', b'"b"'))
    recorded = _read(body, path)
    assert recorded.digest == _read(orjson.loads(text), path).digest
    assert recorded.digest != _read(other, path).digest


def test_an_unreadable_request_keeps_its_instructions() -> None:
    """What cannot be read as messages is compared field by field."""
    body: Any = {"input": 5, "instructions": "be brief"}
    assert differs(_read(body, "/v1/responses"), _read(body | {"instructions": "be long"}, "/v1/responses"))
    assert not differs(_read(body, "/v1/responses"), _read(dict(body), "/v1/responses"))


def test_of_a_request_known_in_part_the_rest_does_not_count() -> None:
    """And a field that a cassette is told to ignore never does."""
    body: Any = {"messages": [{"role": "user", "content": "x"}], "model": "m"}
    request, recorded = _read(body | {"temperature": 1}), _read(body)
    assert differs(request, recorded)
    assert not differs(request, recorded, in_part=True)
    assert differs(recorded, request, in_part=True)
    assert not differs(request, recorded, frozenset(["temperature"]))


@pytest.mark.parametrize(
    "changed", [{"name": "g"}, {"description": "does"}, {"parameters": {"type": "object", "required": ["a"]}}]
)
def test_all_that_a_tool_says_counts(changed: Any) -> None:
    """Its name, description and parameters; not whether it is cached."""
    function: Any = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    body: Any = {"messages": [{"role": "user", "content": "x"}]}
    base, other, same = (
        _read(body | {"tools": [{"type": "function", "function": tool} | more]})
        for tool, more in ((function, {}), (function | changed, {}), (function, {"cache_control": {}}))
    )
    assert differs(other, base)
    assert not differs(same, base)
