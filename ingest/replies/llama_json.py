"""Llama 3: the whole reply is a call, `{"name": ..., "parameters": {...}}`, or several with `;` between.

`<|python_tag|>` may stand in front. Without it a call has no mark of its own, so a text that begins with
a brace is held back until it is whole, and prose behind the object makes all of it content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollbook.ingest.replies.family import Call, skip_space
from rollbook.ingest.replies.json_text import call_at, call_text
from rollbook.ingest.replies.marked import MarkedFamily, Several
from rollbook.store.events import Json

_TAG = "<|python_tag|>"
# A JSON answer that was never meant as a call is no malformed one.
_CALL_LIKE = re.compile(r'<\|python_tag\|>|\{[ \t\r\n]*+"(?:name|type|function|parameters|arguments)"')


def _read(body: str, start: int, tools: Sequence[Json]) -> Several | None:
    calls: list[Call] = []
    position = start
    while position < len(body):
        if body.startswith(_TAG, position):
            position = skip_space(body, position + len(_TAG))
        found = call_at(body, position, ("parameters", "arguments"))
        if found is None:
            return None if calls or _CALL_LIKE.match(body, start) else Several(())
        calls.append(found[0])
        position = skip_space(body, found[1])
        if body.startswith(";", position):
            position = skip_space(body, position + 1)
    return Several(tuple(calls))


def _write(content: str, calls: Sequence[Call], template: str) -> str | None:
    """One call is the whole reply: so the model's own template has it, which refuses several."""
    return None if content or len(calls) > 1 else call_text(calls[0], "parameters")


LLAMA_JSON = MarkedFamily("llama_json", (_TAG,), _read, head="{", written=_write)
