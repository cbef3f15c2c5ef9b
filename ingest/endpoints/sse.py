"""Server-sent events as bytes, written and read. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

from rollbook.store.events import Json

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's chat completions and completions."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON holds no line feed, so it is one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def json_of(data: bytes) -> Any:
    """A JSON value, also with the NaN that some servers write; None where it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def events_of(data: bytes) -> list[Json]:
    """The JSON events of a stream's bytes; not its comments, its end, or an event that was cut off."""
    found = []
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for part in text.split(b"\n\n"):
        lines = [line[5:].strip() for line in part.split(b"\n") if line.startswith(b"data:")]
        event = json_of(b"\n".join(lines)) if lines else None
        if isinstance(event, dict):
            found.append(event)
    return found
