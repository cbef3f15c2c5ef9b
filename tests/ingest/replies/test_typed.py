"""Arguments sampled as bare text get the types that the tool's schema gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollbook.ingest.replies.arguments import (
    argument,
    bare_json,
    members,
    object_end,
    object_text,
    parameters_of,
)

STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        ("5", STRING, '"5"'),
        ("null", STRING, '"null"'),
        ('"q"', STRING, '"\\"q\\""'),
        (" x\n", STRING, '" x\\n"'),
        ("5", INTEGER, "5"),
        ("10.0", INTEGER, "10.0"),
        (" 5 ", INTEGER, "5"),
        ("five", INTEGER, '"five"'),
        ("5", {"type": "number"}, "5"),
        ("1e3", {"type": "number"}, "1e3"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("12345678901234567890123", INTEGER, "12345678901234567890123"),
        ("True", {"type": "boolean"}, "true"),
        ("false", {"type": "boolean"}, "false"),
        ("None", {"type": "null"}, "null"),
        ('{"a": 1.0}', OBJECT, '{"a": 1.0}'),
        ("{'a': 1}", OBJECT, "\"{'a': 1}\""),
        ("[1, 2]", {"type": "array"}, "[1, 2]"),
        ("null", OPTIONAL, "null"),
        ("None", OPTIONAL, "null"),
        ("5", OPTIONAL, '"5"'),
        ("5", {"type": ["string", "integer"]}, "5"),
        ("5.5", {"type": ["string", "integer"]}, '"5.5"'),
        ("true", {"type": ["string", "integer"]}, '"true"'),
        ("null", {"type": "string", "nullable": True}, "null"),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("1", {"enum": [1, 2]}, "1"),
        ("1", {"const": "1"}, '"1"'),
        ("1", {"$ref": "#/$defs/Text"}, '"1"'),
        ("1", {"allOf": [{"$ref": "#/$defs/Text"}]}, '"1"'),
        ("1", {"$ref": "#/$defs/Gone"}, "1"),
        ("1", {"$ref": "#/$defs/Loop"}, "1"),
        ("1", {}, "1"),
        ("one", {}, '"one"'),
        ("1", None, "1"),
        ("", INTEGER, '""'),
    ],
)
def test_values_by_schema(value: str, schema: Any, text: str) -> None:
    """A string where the schema says so; else JSON in its own spelling; else a string."""
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
    parameters = {"properties": {"k": schema}, "$defs": {"Text": STRING, "Loop": loop}}
    assert argument(value, "k", parameters) == text


def test_the_tool_is_found_by_its_name() -> None:
    """Of several tools, the one called; none gives an empty schema."""
    tools = [{"function": {"name": n, "parameters": {"title": n}}} for n in ("a", "b")]
    assert parameters_of(tools, "b") == {"title": "b"}
    assert parameters_of(tools, "c") == {}
    assert parameters_of([{"function": {"name": "a"}}], "a") == {}


def test_objects_are_checked() -> None:
    """What could not be sent is no object."""
    assert object_text({"a": "1", 'b"': '"x"'}) == '{"a": 1, "b\\"": "x"}'
    assert object_text({}) == "{}"
    assert object_text({"a": '"\ud800"'}) is None
    assert object_text({"a": "[" * 5000 + "]" * 5000}) is None
    assert bare_json("[1") is None


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ('{"a": "}"} tail', 0, 10),
        ('x{"a": {"b": [1, "\\"}"]}}', 1, 25),
        ("{}", 0, 2),
        ("{", 0, None),
        ('{"a": "', 0, None),
        ("[1]", 0, None),
        ("", 0, None),
    ],
)
def test_where_objects_end(text: str, start: int, end: int | None) -> None:
    """Braces in strings do not count, nor escaped quotes."""
    assert object_end(text, start) == end


def test_members_keep_their_spelling() -> None:
    """Values to the letter, keys unescaped, the last of a key."""
    text = '{ "a" : {"x": [1.0, {}], "a": 1} , "\\u0062": " c, } ", "n":10.0,"n" : -0, "l": [1, "a"] }'
    spelled = {"a": '{"x": [1.0, {}], "a": 1}', "b": '" c, } "', "n": "-0", "l": '[1, "a"]'}
    assert members(text) == spelled
    assert list(members(text)) == list(json.loads(text))
    assert members("{}") == {}
