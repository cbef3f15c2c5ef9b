"""The normal form: what clients change when they echo a message, and what makes another message."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ingest.tokens.message_form import canonical_arguments, chain_all, normal

NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=4)


def _call(arguments: Any, name: str = "calc") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def _reversed(value: Any) -> Any:
    """The same JSON with every object's keys the other way round."""
    if isinstance(value, dict):
        return {k: _reversed(v) for k, v in reversed(value.items())}
    return [_reversed(v) for v in value] if isinstance(value, list) else value


def _floats(value: Any) -> Any:
    """The same JSON with every integer written as a float."""
    if isinstance(value, dict):
        return {k: _floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_floats(v) for v in value]
    return float(value) if type(value) is int else value


@settings(max_examples=200)
@given(ARGUMENTS)
def test_arguments_rewritten_by_a_client_stay_the_same(arguments: dict[str, Any]) -> None:
    """Key order, white space, escapes, 10.0 for 10 and a parsed object do not change a call."""
    plain = normal(_call(json.dumps(arguments)))
    assert plain == normal(_call(json.dumps(_reversed(arguments), indent=3)))
    assert plain == normal(_call(json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))))
    assert plain == normal(_call(json.dumps(_floats(arguments))))
    assert plain == normal(_call(arguments))


@settings(max_examples=200)
@given(ARGUMENTS, ARGUMENTS)
def test_other_arguments_are_another_call(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two calls are the same only if their arguments are equal JSON values."""

    def exact(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: exact(v) for k, v in value.items()}
        if isinstance(value, list):
            return [exact(v) for v in value]
        return (type(value) is bool, value)  # Python takes True for 1

    same = exact(one) == exact(other)
    assert (normal(_call(json.dumps(one))) == normal(_call(json.dumps(other)))) == same


def test_canonical_arguments_are_pinned() -> None:
    """The canonical form is compact, sorted JSON with integral floats as integers."""
    assert canonical_arguments('{ "b": 10.0, "a": [1.50, -0.0, true, null] }') == (
        '{"a":[1.5,0,true,null],"b":10}'
    )
    assert canonical_arguments(None) == "null"
    assert canonical_arguments("") == ""
    assert canonical_arguments('{"a": ') == '{"a": '
    assert canonical_arguments('{"a": 1e300}') == '{"a":1e+300}'


def test_arguments_too_deep_for_json_stay_text() -> None:
    """Arguments nested beyond what the JSON writer takes are compared as text, not an error."""
    deep = "[" * 600 + "]" * 600
    assert canonical_arguments(deep) == deep


@pytest.mark.parametrize("empty", [None, "", []])
def test_empty_contents_are_one(empty: Any) -> None:
    """None, an empty string, no parts and no content at all say the same."""
    assert normal({"role": "assistant", "content": empty}) == normal({"role": "assistant"})


def test_text_parts_are_their_text() -> None:
    """A list of text parts is the text they spell together."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo\n"}]
    assert normal({"role": "user", "content": parts}) == normal({"role": "user", "content": "Hello\n"})
    image = [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert normal({"role": "user", "content": image}) != normal({"role": "user", "content": "Hello"})


def test_extra_keys_do_not_count() -> None:
    """Call ids, indexes, names, refusals and the like are no part of what was said."""
    plain = _call('{"a": 1}')
    call = plain["tool_calls"][0] | {"id": "other", "index": 0, "type": "function"}
    dressed = plain | {"refusal": None, "audio": None, "annotations": [], "name": "x", "tool_calls": [call]}
    assert normal(plain) == normal(dressed)
    assert normal({"role": "user", "content": "a"}) == normal(
        {"role": "user", "content": "a", "tool_calls": None}
    )


@pytest.mark.parametrize(("alias", "role"), [("developer", "system"), ("function", "tool")])
def test_old_role_names_are_their_new_ones(alias: str, role: str) -> None:
    """developer is system, function is tool."""
    assert normal({"role": alias, "content": "a"}) == normal({"role": role, "content": "a"})


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "add 1 and 2"},
        {"role": "assistant", "content": "add 1 and 2 "},
        {"role": "assistant", "content": " add 1 and 2"},
        {"role": "assistant", "content": "add 1 and 2\n"},
        {"role": "assistant", "content": "add 1 and 3"},
        {"role": "assistant", "content": "add 1 and 2"} | {"tool_calls": _call("{}")["tool_calls"]},
    ],
)
def test_another_role_content_or_white_space_is_another_message(other: dict[str, Any]) -> None:
    """What the model would read differently never has the same normal form."""
    assert normal(other) != normal({"role": "assistant", "content": "add 1 and 2"})


def test_calls_differ_by_name_order_and_value() -> None:
    """Another function, other arguments or other order of calls is another message."""
    calls = [_call('{"a": 1}')["tool_calls"][0], _call('{"a": 2}')["tool_calls"][0]]
    both = {"role": "assistant", "tool_calls": calls}
    assert normal(both) != normal({"role": "assistant", "tool_calls": calls[::-1]})
    assert normal(_call("{}")) != normal(_call("{}", "look"))
    assert normal(_call('{"a": 1}')) != normal(_call('{"a": "1"}'))


def test_the_chain_covers_every_prefix() -> None:
    """Element k hashes the first k messages, and depends on each of them and their order."""
    messages = [{"role": "user", "content": str(i)} for i in range(4)]
    hashes = chain_all(messages)
    assert len(hashes) == 5
    assert hashes[0] == b""
    assert len(set(hashes)) == 5
    assert chain_all(messages[:2]) == hashes[:3]
    assert chain_all([messages[1], messages[0]])[-1] != hashes[2]
    assert chain_all([{"role": "user", "content": "01"}])[-1] != chain_all(messages[:2])[-1]


@settings(max_examples=100)
@given(st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), max_size=5))
def test_equal_messages_have_equal_chains(messages: list[dict[str, Any]]) -> None:
    """The chain is a function of the messages' values alone."""
    again = orjson.loads(orjson.dumps([_reversed(m) for m in messages]))
    assert chain_all(messages) == chain_all(again)
