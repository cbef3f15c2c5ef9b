"""Families whose calls are tags: GLM, and Qwen3-Coder with those after it.

GLM-4.5 and later: a name, then keys and values as tags, values as bare text.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Later models leave the line feeds out. A value ends at an `</arg_value>` that another tag follows. A reply
ends with the marker of the role that comes next, which the model samples.

Qwen3-Coder, Qwen3.5 and later, Nemotron 3: calls as tags, values as bare text.

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

from rollbook.ingest.replies.arguments import argument, bare_values, object_text, parameters_of
from rollbook.ingest.replies.family import SPACE, Call, skip_space
from rollbook.ingest.replies.marked import MarkedFamily, ParsedCall, ParsedCalls, behind, read_each
from rollbook.store.events import Json

_GLM_OPEN, _GLM_CLOSE = "<tool_call>", "</tool_call>"
_GLM_OPENING = re.compile(r"<tool_call>[ \t\r\n]*+([^ \t\r\n<{}\"]++)?")
_KEY = re.compile(r"<arg_key>([^<\n]++)</arg_key>[ \t\r\n]*+<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>[ \t\r\n]*+(?=<arg_key>|</tool_call>)")
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _read_glm(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    return read_each(body, start, _GLM_OPENING, partial(_glm_argument, tools=tools))


def _glm_argument(match: re.Match[str], tools: Sequence[Json]) -> ParsedCall | None:
    if match[1] is None:
        return None
    body, schema = match.string, parameters_of(tools, match[1])
    values: dict[str, str] = {}
    position = skip_space(body, match.end())
    while key := _KEY.match(body, position):
        end = _GLM_VALUE_END.search(body, key.end())
        if end is None:
            return None
        name = key[1].strip(SPACE)
        values[name] = argument(body[key.end() : end.start()], name, schema)
        position = end.end()
    arguments = object_text(values)
    if arguments is None or not body.startswith(_GLM_CLOSE, position):
        return None
    return ParsedCall(Call(match[1], arguments), position + len(_GLM_CLOSE))


def _write_glm(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n", "\n".join(map(_glm_call_text, calls)))


def _glm_call_text(call: Call) -> str:
    values = bare_values(call.arguments).items()
    tags = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values]
    return f"{_GLM_OPEN}{call.name}\n{''.join(tags)}{_GLM_CLOSE}"


GLM = MarkedFamily(
    "glm",
    (_GLM_OPEN,),
    _read_glm,
    others=(_GLM_CLOSE, *_TAGS),
    written=_write_glm,
    ends=("<|user|>", "<|observation|>"),
)


_QWEN_OPEN, _QWEN_CLOSE, _FUNCTION_CLOSE = "<tool_call>", "</tool_call>", "</function>"
_QWEN_OPENING = re.compile(r"<tool_call>[ \t\r\n]*+|<function=")
_FUNCTION = re.compile(r"<function=([^\n<>]++)>")
_PARAMETER = re.compile(r"<parameter=([^\n<>]++)>\n?")
# The end of a value, as it should be; or a line that is the next tag, with `</parameter>` forgotten.
_QWEN_VALUE_END = re.compile(
    r"\n?</parameter>[ \t\r\n]*+(?=<parameter=|</function>)"
    r"|\n(?=<parameter=(?P<next>[^\n<>]++)>\n)"
    r"|\n(?=</function>[ \t\r\n]*+</tool_call>)"
)


def _read_qwen(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    return read_each(body, start, _QWEN_OPENING, partial(_qwen_call, tools=tools))


def _qwen_call(match: re.Match[str], tools: Sequence[Json]) -> ParsedCall | None:
    body, wrapped = match.string, match.group().startswith(_QWEN_OPEN)
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
    closed = body.startswith(_QWEN_CLOSE, close)
    end = close + len(_QWEN_CLOSE) if closed else end
    return ParsedCall(Call(header[1], arguments), end, mended or not wrapped or not closed)


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


def _value_end(
    body: str, header: re.Match[str], parameters: dict[str, str], schema: Json
) -> re.Match[str] | None:
    # From one before: an empty value's line feed is the header's, too.
    for end in _QWEN_VALUE_END.finditer(body, header.end() - 1):
        name = end["next"]
        if name is None:
            return end
        # Only a parameter that the tool has, and that is still due, is taken for a tag.
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties and name not in {*parameters, header[1]}:
            return end
    return None


def _write_qwen(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n\n", "\n".join(map(_qwen_call_text, calls)))


def _qwen_call_text(call: Call) -> str:
    values = bare_values(call.arguments).items()
    tags = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values]
    return f"{_QWEN_OPEN}\n<function={call.name}>\n{''.join(tags)}{_FUNCTION_CLOSE}\n{_QWEN_CLOSE}"


QWEN_CODER = MarkedFamily(
    "qwen_coder", (_QWEN_OPEN, "<function="), _read_qwen, others=(_QWEN_CLOSE,), written=_write_qwen
)
