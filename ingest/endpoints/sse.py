"""Server-sent events as bytes, written and read. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

from rollbook.ingest.server_sent_events import messages_of

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


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream's bytes; not its comments, its end, or an event that was cut off."""
    found = (json_of(message.data) for message in messages_of(data))
    return [event for event in found if isinstance(event, dict)]
