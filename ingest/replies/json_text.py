"""JSON as sampled text: where an object ends, and its members' values verbatim.

Nothing here recurses, so that what is read does not depend on how deep the caller's stack is; orjson
judges validity and refuses nesting beyond 1024, NaN, infinities and halves of surrogate pairs.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from rollbook.ingest.replies.family import SPACE, Call, skip_space

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
    found: dict[str, str] = {}
    key, begin, depth = "", 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in (",", "}") and depth == 1 and begin:
            found[key] = text[begin : token.start()].strip(SPACE)
            begin = 0
        elif mark == ":" and depth == 1:
            begin = token.end()
        elif mark[0] == '"' and depth == 1 and not begin:
            key = orjson.loads(mark)
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
    return found


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
