"""Arguments of calls as sampled text: JSON, and bare text typed by the tool's schema.

Of JSON: where an object ends, and its members' values verbatim.

Nothing here recurses, so that what is read does not depend on how deep the caller's stack is; orjson
judges validity and refuses nesting beyond 1024, NaN, infinities and halves of surrogate pairs.

Families of bare text write the string "5" and the number 5 alike. Where the schema says string and nothing
else, the text is the string. Elsewhere (and where the schema says nothing) it is read as JSON, its spelling
kept, or as one of Python's True, False and None, which some templates print; else it is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollbook.ingest.replies.family import SPACE, Call, skip_space
from rollbook.store.events import Json

# A string without its end is one token to the end of the text, so that scanning stays linear.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[{}\[\],:]', re.DOTALL)


def object_end(text: str, start: int) -> int | None:
    """Where the object that opens at `start` closes; None: it does not, or there is none."""
    if not text.startswith("{", start):
        return None
    depth = 0
    for token in _TOKEN.finditer(text, start):
        mark = token.group()
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
            if depth == 0:
                return token.end()
    return None


def loads(text: str) -> Any:
    """The value of a JSON text; `...` if it is none (null is a value)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return ...


def is_object(text: str) -> bool:
    """The text is a JSON object that can be sent and stored."""
    return isinstance(loads(text), dict)


def members(text: str) -> dict[str, str]:
    """The members of a valid JSON object, their values as they are written; the last of a key counts."""
    values: dict[str, str] = {}
    key, begin, depth = "", 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in (",", "}") and depth == 1 and begin:
            values[key] = text[begin : token.start()].strip(SPACE)
            begin = 0
        elif mark == ":" and depth == 1:
            begin = token.end()
        elif mark[0] == '"' and depth == 1 and not begin:
            key = orjson.loads(mark)
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
    return values


def call_at(text: str, start: int, keys: tuple[str, ...] = ("arguments",)) -> tuple[Call, int] | None:
    """The call that the object at `start` spells, `{"name": ..., "arguments": {...}}`, and its end.

    Args:
        keys: under which the arguments may be.
    """
    end = object_end(text, start)
    if end is None:
        return None
    value = loads(text[start:end])
    if not isinstance(value, dict):
        return None
    name, key = value.get("name"), next((k for k in keys if k in value), "")
    if not isinstance(name, str) or not isinstance(value.get(key), dict):
        return None
    return Call(name, members(text[start:end])[key]), end


def arguments_at(text: str, start: int) -> tuple[str, int] | None:
    """The JSON object at `start`, white space before it skipped, and its end."""
    start = skip_space(text, start)
    end = object_end(text, start)
    if end is None or not is_object(text[start:end]):
        return None
    return text[start:end], end


def call_text(call: Call, key: str = "arguments") -> str:
    """A call as the object that `call_at` reads."""
    return f'{{"name": {string_text(call.name)}, "{key}": {call.arguments}}}'


def string_text(value: str) -> str:
    """A string as JSON."""
    return json.dumps(value, ensure_ascii=False)


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def parameters_of(tools: Sequence[Json], name: str) -> Json:
    """The schema of a tool's parameters; empty if the request offered no such tool or no schema."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def argument(value: str, key: str, parameters: Json) -> str:
    """A sampled value as JSON text, by what the parameters' schema says of its key."""
    properties = parameters.get("properties")
    types = _types(properties.get(key) if isinstance(properties, dict) else None, parameters)
    text = bare_json(value)
    if text is None or ("string" in types and not _is_any(loads(text), types - {"string"})):
        return string_text(value)
    return text


def object_text(values: Mapping[str, str]) -> str | None:
    """A JSON object of values that are JSON already; None: it is none (half a surrogate pair in it)."""
    text = "{" + ", ".join(f"{string_text(k)}: {v}" for k, v in values.items()) + "}"
    return text if is_object(text) else None


def bare_values(arguments: str) -> dict[str, str]:
    """The values of a JSON object as such families write them: strings bare, all else as JSON."""
    loaded = {key: (loads(text), text) for key, text in members(arguments).items()}
    return {key: value if isinstance(value, str) else text for key, (value, text) in loaded.items()}


def bare_json(value: str) -> str | None:
    """The value's text if it is JSON, or a Python constant that JSON has; else None."""
    text = value.strip(SPACE)
    text = _PYTHON.get(text, text)
    return None if loads(text) is ... else text


def _is_any(value: Any, types: set[str]) -> bool:
    """The value is of one of the schema's types."""
    kinds = {dict: "object", list: "array", bool: "boolean", type(None): "null", str: "string"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, int) or value.is_integer()
        return "number" in types or ("integer" in types and whole)
    return kinds[type(value)] in types


def _types(schema: Any, root: Json) -> set[str]:
    """The types a schema allows, through unions, enumerations and local references; empty: any."""
    types: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        declared = node.get("type")
        types |= {t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)}
        if declared is None:
            listed = node.get("enum") if isinstance(node.get("enum"), list) else []
            constants = [*(listed or []), *([node["const"]] if "const" in node else [])]
            types |= {_name(c) for c in constants}
        if node.get("nullable") is True:
            types.add("null")
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += node[union] if isinstance(node.get(union), list) else []
        reference = node.get("$ref")
        # Each reference once: schemas may refer to themselves.
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_resolve(reference, root))
    return types


def _name(value: Any) -> str:
    names = ("string", "null", "boolean", "number", "array", "object")
    return next(n for n in names if _is_any(value, {n}))


def _resolve(reference: str, root: Json) -> Any:
    """What a local reference, `#/$defs/NAME`, stands for; None if it leads nowhere."""
    at: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
    return at if reference.startswith("#/") else None
