"""Server-sent events as bytes. Pure."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's chat completions and completions."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON holds no line feed, so it is one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
