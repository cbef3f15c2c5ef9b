"""Mistral, both forms: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11
`[TOOL_CALLS]NAME[ARGS]{...}` for each call, some with `[CALL_ID]ID` in between. Magistral reasons in
`[THINK]`, its first release in `<think>`. A sampled call id is not used: ids are minted by the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollbook.ingest.replies.family import TEXT_AFTER_CALLS, Call, blank, skip_space
from rollbook.ingest.replies.json_text import arguments_at, call_at, call_text
from rollbook.ingest.replies.marked import MarkedFamily, One, Several, read_each
from rollbook.ingest.replies.reasoning import BRACKET_THINK, THINK
from rollbook.store.events import Json

_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPENING = re.compile(r"\[TOOL_CALLS\][ \t\r\n]*+")
_HEADER = re.compile(
    r"([^ \t\r\n\[\]{}]++)[ \t\r\n]*+(?:\[CALL_ID\][^\[\]{}]*+)?(?:\[ARGS\][ \t\r\n]*+)?(?=\{)"
)


def _read(body: str, start: int, tools: Sequence[Json]) -> Several | None:
    first = skip_space(body, start + len(_OPEN))
    if body.startswith("[", first) and not body.startswith(_ARGS, first):
        return _array(body, first)
    return read_each(body, start, _OPENING, _named)


def _named(match: re.Match[str]) -> One | None:
    header = _HEADER.match(match.string, match.end())
    found = arguments_at(match.string, header.end()) if header else None
    if header is None or found is None:
        return None
    return One(Call(header[1], found[0]), found[1])


def _array(body: str, opening: int) -> Several | None:
    calls: list[Call] = []
    position = opening
    while body.startswith("," if calls else "[", position):
        found = call_at(body, skip_space(body, position + 1))
        if found is None:
            return None
        calls.append(found[0])
        position = skip_space(body, found[1])
    if not body.startswith("]", position):
        return None
    return Several(tuple(calls), () if blank(body[position + 1 :]) else (TEXT_AFTER_CALLS,))


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    if _ARGS in template:
        return content + "".join(f"{_OPEN}{call.name}{_ARGS}{call.arguments}" for call in calls)
    return f"{content}{_OPEN}[{', '.join(map(call_text, calls))}]"


MISTRAL = MarkedFamily(
    "mistral",
    (_OPEN,),
    _read,
    others=(_CALL_ID, _ARGS),
    blocks=(BRACKET_THINK, THINK),
    written=_write,
)
