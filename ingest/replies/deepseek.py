"""DeepSeek: three generations of calls, each recognised by what it begins with.

V3 and R1 name a type, then the function, and fence the arguments; V3.1 names the function at once:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2 writes DSML tags (V4 calls the outer one `tool_calls`), which say themselves what is a string:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The outer closing tag bears no meaning and may be missing: R1's own template forgets it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from rollbook.ingest.replies.arguments import (
    argument,
    arguments_at,
    bare_json,
    bare_values,
    members,
    object_text,
    parameters_of,
    string_text,
)
from rollbook.ingest.replies.family import SPACE, Call
from rollbook.ingest.replies.marked import MarkedFamily, ParsedCall, ParsedCalls, behind, read_each
from rollbook.store.events import Json

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_OPENING = re.compile(rf"(?:{_ALL}[ \t\r\n]*+)?{_CALL}([^<]*+){_SEP}[ \t\r\n]*+|{_ALL}|{_CALL}")
_FENCED = re.compile(r"([^\n`{]++)\n[ \t\r\n]*+(?:```(?:json)?[ \t\r\n]*+)?(?=\{)")
_CLOSING = re.compile(rf"[ \t\r\n]*+(?:```[ \t\r\n]*+)?{_CALL_END}(?:[ \t\r\n]*+{_ALL_END})?")

_DSML = "｜DSML｜"
_DSML_OPENING = re.compile(
    rf'(?:<{_DSML}(?:function_calls|tool_calls)>[ \t\r\n]*+)?<{_DSML}invoke name="([^"\n]*+)">[ \t\r\n]*+'
    rf"|<{_DSML}"
)
_PARAMETER = re.compile(rf'<{_DSML}parameter name="([^"\n]*+)"(?: string="(true|false)")?>')
_VALUE_END = re.compile(rf"</{_DSML}parameter>[ \t\r\n]*+(?=<{_DSML}parameter |</{_DSML}invoke>)")
_INVOKE_END = re.compile(rf"</{_DSML}invoke>(?:[ \t\r\n]*+</{_DSML}(?:function_calls|tool_calls)>)?")


def _read(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    if body.startswith(f"<{_DSML}", start):
        return read_each(body, start, _DSML_OPENING, partial(_invoke, tools=tools))
    return read_each(body, start, _OPENING, _read_call)


def _read_call(match: re.Match[str]) -> ParsedCall | None:
    if match[1] is None:
        return None
    body, name, position = match.string, match[1], match.end()
    if not body.startswith("{", position):
        fenced = _FENCED.match(body, position)
        if fenced is None:
            return None
        name, position = fenced[1], fenced.end()
    parsed = arguments_at(body, position)
    closing = _CLOSING.match(body, parsed[1]) if parsed else None
    if parsed is None or closing is None or not name.strip(SPACE):
        return None
    return ParsedCall(Call(name.strip(SPACE), parsed[0]), closing.end())


def _invoke(match: re.Match[str], tools: Sequence[Json]) -> ParsedCall | None:
    if match[1] is None:
        return None
    body, position = match.string, match.end()
    schema = parameters_of(tools, match[1])
    values: dict[str, str] = {}
    while parameter := _PARAMETER.match(body, position):
        end = _VALUE_END.search(body, parameter.end())
        if end is None:
            return None
        value = body[parameter.end() : end.start()]
        values[parameter[1]] = _value(value, parameter, schema)
        position = end.end()
    arguments = object_text(values)
    closing = _INVOKE_END.match(body, position)
    if arguments is None or closing is None:
        return None
    return ParsedCall(Call(match[1], arguments), closing.end())


def _value(value: str, parameter: re.Match[str], schema: Json) -> str:
    if parameter[2] == "true":
        return string_text(value)
    if parameter[2] == "false":
        return bare_json(value) or string_text(value)
    return argument(value, parameter[1], schema)


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    if _DSML in template:
        outer = "tool_calls" if f"{_DSML}tool_calls" in template else "function_calls"
        invoked = "\n".join(map(_invoke_text, calls))
        return behind(content, "\n\n", f"<{_DSML}{outer}>\n{invoked}\n</{_DSML}{outer}>")
    if "```json" in template:
        fenced = (f"function{_SEP}{call.name}\n```json\n{call.arguments}\n```" for call in calls)
        return f"{content}{_ALL}" + "\n".join(f"{_CALL}{text}{_CALL_END}" for text in fenced) + _ALL_END
    plain = "".join(f"{_CALL}{call.name}{_SEP}{call.arguments}{_CALL_END}" for call in calls)
    return f"{content}{_ALL}{plain}{_ALL_END}"


def _invoke_text(call: Call) -> str:
    spelled = members(call.arguments)
    tags = [
        f'<{_DSML}parameter name="{key}" string="{"true" if bare != spelled[key] else "false"}">'
        f"{bare}</{_DSML}parameter>\n"
        for key, bare in bare_values(call.arguments).items()
    ]
    return f'<{_DSML}invoke name="{call.name}">\n{"".join(tags)}</{_DSML}invoke>'


DEEPSEEK = MarkedFamily(
    "deepseek",
    (_ALL, _CALL, f"<{_DSML}"),
    _read,
    others=(_ALL_END, _SEP, _CALL_END, _DSML),
    written=_write,
)
