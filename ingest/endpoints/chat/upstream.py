"""Chat completions as they pass to an upstream. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.api import UpstreamForm
from rollbook.ingest.endpoints.chat.read import PATH, read
from rollbook.ingest.endpoints.lenient import LenientReader
from rollbook.ingest.endpoints.openai_choices import LAST_EVENT, function_calls, gather, read_reply
from rollbook.store.events import Json


def _softened(messages: list[Any]) -> list[Json]:
    """The roles alone: content of any kind is recorded as it was sent."""
    return [{"role": message["role"], "content": ""} for message in messages]


def _with_function_calls(messages: list[Any]) -> list[Json]:
    """The messages, with all their calls as calls of functions."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        found.append(message if not calls else message | {"tool_calls": function_calls(calls)})
    return found


_READER = LenientReader(PATH, "messages", read, _softened, _with_function_calls)

UPSTREAM = UpstreamForm(
    read=lambda body, known: _READER.call(body),
    reply=read_reply,
    gather=gather,
    last_event=LAST_EVENT,
    paths=(f"POST {PATH}",),
    takes_fields=True,
)
