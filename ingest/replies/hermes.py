"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollbook.ingest.replies.family import Call, skip_space
from rollbook.ingest.replies.json_text import call_at, call_text
from rollbook.ingest.replies.marked import MarkedFamily, One, Several, behind, read_each
from rollbook.store.events import Json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = re.compile(_OPEN)


def _read(body: str, start: int, tools: Sequence[Json]) -> Several | None:
    return read_each(body, start, _OPENING, _one)


def _one(match: re.Match[str]) -> One | None:
    body = match.string
    found = call_at(body, skip_space(body, match.end()))
    if found is None:
        return None
    call, end = found
    end = skip_space(body, end)
    return One(call, end + len(_CLOSE)) if body.startswith(_CLOSE, end) else None


def _write(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n", "\n".join(f"{_OPEN}\n{call_text(call)}\n{_CLOSE}" for call in calls))


HERMES = MarkedFamily("hermes", (_OPEN,), _read, others=(_CLOSE,), written=_write)
