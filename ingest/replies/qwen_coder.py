"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: calls as tags, values as bare text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value ends at a `</parameter>` that another tag follows, so it may speak of such tags itself. These
models are known to drop tags in long contexts; a call that lacks its `<tool_call>`, its `</tool_call>` or
a `</parameter>` is read and flagged. One without `</function>` is not: its last value may be cut short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from rollbook.ingest.replies.family import Call, skip_space
from rollbook.ingest.replies.marked import MarkedFamily, One, Several, behind, read_each
from rollbook.ingest.replies.typed import argument, bare_values, object_text, parameters_of
from rollbook.store.events import Json

_OPEN, _CLOSE, _FUNCTION_CLOSE = "<tool_call>", "</tool_call>", "</function>"
_OPENING = re.compile(r"<tool_call>[ \t\r\n]*+|<function=")
_FUNCTION = re.compile(r"<function=([^\n<>]++)>")
_PARAMETER = re.compile(r"<parameter=([^\n<>]++)>\n?")
# The end of a value, as it should be; or a line that is the next tag, with `</parameter>` forgotten.
_VALUE_END = re.compile(
    r"\n?</parameter>[ \t\r\n]*+(?=<parameter=|</function>)"
    r"|\n(?=<parameter=(?P<next>[^\n<>]++)>\n)"
    r"|\n(?=</function>[ \t\r\n]*+</tool_call>)"
)


def _read(body: str, start: int, tools: Sequence[Json]) -> Several | None:
    return read_each(body, start, _OPENING, partial(_one, tools=tools))


def _one(match: re.Match[str], tools: Sequence[Json]) -> One | None:
    body, wrapped = match.string, match.group().startswith(_OPEN)
    header = _FUNCTION.match(body, match.end() if wrapped else match.start())
    if header is None:
        return None
    schema = parameters_of(tools, header[1])
    read = _values(body, header.end(), schema)
    if read is None:
        return None
    values, end, mended = read
    arguments = object_text(values)
    if arguments is None:
        return None
    close = skip_space(body, end)
    closed = body.startswith(_CLOSE, close)
    end = close + len(_CLOSE) if closed else end
    return One(Call(header[1], arguments), end, mended or not wrapped or not closed)


def _values(body: str, position: int, schema: Json) -> tuple[dict[str, str], int, bool] | None:
    """The parameters up to and with `</function>`: values, end, whether a tag was missing."""
    values: dict[str, str] = {}
    mended = False
    while True:
        position = skip_space(body, position)
        if body.startswith(_FUNCTION_CLOSE, position):
            return values, position + len(_FUNCTION_CLOSE), mended
        header = _PARAMETER.match(body, position)
        end = _value_end(body, header, values, schema) if header else None
        if header is None or end is None:
            return None
        value = body[header.end() : max(header.end(), end.start())]
        values[header[1]] = argument(value, header[1], schema)
        mended = mended or "</parameter>" not in end.group()
        position = end.end()


def _value_end(body: str, header: re.Match[str], given: dict[str, str], schema: Json) -> re.Match[str] | None:
    # From one before: an empty value's line feed is the header's, too.
    for end in _VALUE_END.finditer(body, header.end() - 1):
        name = end["next"]
        if name is None:
            return end
        # Only a parameter that the tool has, and that is still due, is taken for a tag.
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties and name not in {*given, header[1]}:
            return end
    return None


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n\n", "\n".join(map(_call_text, calls)))


def _call_text(call: Call) -> str:
    values = bare_values(call.arguments).items()
    tags = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values]
    return f"{_OPEN}\n<function={call.name}>\n{''.join(tags)}{_FUNCTION_CLOSE}\n{_CLOSE}"


QWEN_CODER = MarkedFamily("qwen_coder", (_OPEN, "<function="), _read, others=(_CLOSE,), written=_write)
