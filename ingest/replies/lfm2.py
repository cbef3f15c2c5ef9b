"""LFM2: calls as Python writes them, in one list.

    <|tool_call_start|>[NAME(KEY='text', KEY=5), NAME()]<|tool_call_end|>

Values are Python's literals, or JSON's: the templates write objects as JSON, and models mix the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollbook.ingest.replies.arguments import bare_json, loads, members, object_text, string_text
from rollbook.ingest.replies.family import TEXT_AFTER_CALLS, Call, blank, skip_space
from rollbook.ingest.replies.marked import MarkedFamily, ParsedCalls
from rollbook.store.events import Json

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_CALL = re.compile(r"[ \t\r\n]*+([^\s(),=\[\]{}'\"<>]++)[ \t\r\n]*+\(")
_KEY = re.compile(r"[ \t\r\n]*+([^\s(),=\[\]{}'\"<>]++)[ \t\r\n]*+=")
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|[\[\]{}:,()]|[^\s\[\]{}:,()'\"]++", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_SPELLED = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"})
_OF_JSON = {"true": "True", "false": "False", "null": "None"}


def _read(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    calls: list[Call] = []
    position = start
    while body.startswith(_OPEN, position):
        several = _list(body, skip_space(body, position + len(_OPEN)))
        if several is None:
            return None
        calls += several[0]
        position = skip_space(body, several[1])
    after = not blank(body[position:])
    return ParsedCalls(tuple(calls), (TEXT_AFTER_CALLS,) if after else ()) if calls else None


def _list(body: str, opening: int) -> tuple[list[Call], int] | None:
    """The calls of a list, and where its closing marker ends."""
    calls: list[Call] = []
    position = opening
    while body.startswith("," if calls else "[", position):
        parsed = _call(body, position + 1)
        if parsed is None:
            return None
        calls.append(parsed[0])
        position = skip_space(body, parsed[1])
    close = skip_space(body, position + 1)
    if not body.startswith("]", position) or not body.startswith(_CLOSE, close):
        return None
    return calls, close + len(_CLOSE)


def _call(body: str, start: int) -> tuple[Call, int] | None:
    name = _CALL.match(body, start)
    if name is None:
        return None
    values: dict[str, str] = {}
    position = skip_space(body, name.end())
    while not body.startswith(")", position):
        key = _KEY.match(body, position)
        value = _value(body, key.end()) if key else None
        if key is None or value is None:
            return None
        values[key[1]], position = value
        if body.startswith(",", position):
            position = skip_space(body, position + 1)
    arguments = object_text(values)
    return (Call(name[1], arguments), position + 1) if arguments is not None else None


def _value(body: str, start: int) -> tuple[str, int] | None:
    """A value as JSON text, and where the comma or the parenthesis behind it is."""
    pieces: list[str] = []
    depth, position = 0, start
    while token := _TOKEN.match(body, skip_space(body, position)):
        mark = token.group()
        if depth == 0 and mark in (",", ")"):
            text = "".join(pieces)
            return None if loads(text) is ... else (text, token.start())
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        pieces.append(_as_json(mark))
        position = token.end()
    return None


def _as_json(token: str) -> str:
    if token[0] in "'\"":
        return string_text(_ESCAPE.sub(_unescaped, token[1:-1]))
    return bare_json(token) or token


def _unescaped(escape: re.Match[str]) -> str:
    what = escape[1]
    if len(what) > 1:
        code = int(what[1:], 16)
        return chr(code) if code <= 0x10FFFF else escape.group()
    return _ESCAPED.get(what, escape.group())


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    return f"{content}{_OPEN}[{', '.join(map(_call_text, calls))}]{_CLOSE}"


def _call_text(call: Call) -> str:
    spelled = (f"{key}={_python(text)}" for key, text in members(call.arguments).items())
    return f"{call.name}({', '.join(spelled)})"


def _python(text: str) -> str:
    value = loads(text)
    return f"'{value.translate(_SPELLED)}'" if isinstance(value, str) else _OF_JSON.get(text, text)


LFM2 = MarkedFamily("lfm2", (_OPEN,), _read, others=(_CLOSE,), written=_write)
