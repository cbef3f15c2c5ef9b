"""GLM-4.5 and later: a name, then keys and values as tags, values as bare text.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Later models leave the line feeds out. A value ends at an `</arg_value>` that another tag follows. A reply
ends with the marker of the role that comes next, which the model samples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from rollbook.ingest.replies.family import SPACE, Call, skip_space
from rollbook.ingest.replies.marked import MarkedFamily, One, Several, behind, read_each
from rollbook.ingest.replies.typed import argument, bare_values, object_text, parameters_of
from rollbook.store.events import Json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = re.compile(r"<tool_call>[ \t\r\n]*+([^ \t\r\n<{}\"]++)?")
_KEY = re.compile(r"<arg_key>([^<\n]++)</arg_key>[ \t\r\n]*+<arg_value>")
_VALUE_END = re.compile(r"</arg_value>[ \t\r\n]*+(?=<arg_key>|</tool_call>)")
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _read(body: str, start: int, tools: Sequence[Json]) -> Several | None:
    return read_each(body, start, _OPENING, partial(_one, tools=tools))


def _one(match: re.Match[str], tools: Sequence[Json]) -> One | None:
    if match[1] is None:
        return None
    body, schema = match.string, parameters_of(tools, match[1])
    values: dict[str, str] = {}
    position = skip_space(body, match.end())
    while key := _KEY.match(body, position):
        end = _VALUE_END.search(body, key.end())
        if end is None:
            return None
        name = key[1].strip(SPACE)
        values[name] = argument(body[key.end() : end.start()], name, schema)
        position = end.end()
    arguments = object_text(values)
    if arguments is None or not body.startswith(_CLOSE, position):
        return None
    return One(Call(match[1], arguments), position + len(_CLOSE))


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n", "\n".join(map(_call_text, calls)))


def _call_text(call: Call) -> str:
    values = bare_values(call.arguments).items()
    tags = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values]
    return f"{_OPEN}{call.name}\n{''.join(tags)}{_CLOSE}"


GLM = MarkedFamily(
    "glm",
    (_OPEN,),
    _read,
    others=(_CLOSE, *_TAGS),
    written=_write,
    ends=("<|user|>", "<|observation|>"),
)
