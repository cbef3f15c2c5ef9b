"""Items of a Responses request as chat messages. Pure.

What the model said comes as several items: reasoning, a message, calls. Those that follow one another are one
assistant message, as long as they can be of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollbook.ingest.endpoints.history import History
from rollbook.ingest.endpoints.responses.reply import call_index, turn_of
from rollbook.ingest.tokens.message_form import (
    arguments_in_form,
    content_in_form,
    refused,
    shown,
    text_of,
    unread,
    unread_in_parts,
)
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

ROLES = ("user", "system", "developer", "assistant")
_PARTS = ("reasoning_content", "content", "tool_calls")
"""In the order in which a reply has them."""


class _Said:
    """Chat messages as they are gathered from items."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._reached = len(_PARTS)

    def add(self, message: Json) -> None:
        """Somebody else's message."""
        self.messages.append(message)
        self._reached = len(_PARTS)

    def reply_part(self, name: str, value: Any) -> None:
        """A part of what the model said: of the reply before it, or of a new one."""
        place = _PARTS.index(name)
        follows = self._reached < place or (self._reached == place and name == "tool_calls")
        if not follows:
            self.messages.append({"role": "assistant", "content": None})
        self._reached = place
        last = self.messages[-1]
        last[name] = [*last.get(name, ()), *value] if name == "tool_calls" else value


def chat_messages(items: Sequence[Any], history: History) -> list[Json]:
    """The messages that the items are.

    Raises:
        RequestError: 400, an item of a kind that is not served; 404, a reference to what is not there.
    """
    said = _Said()
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise refused(f"input[{index}]", item, "send an object")
        _add(said, f"input[{index}]", item, history)
    return said.messages


_READ = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("output", "call_id"),
    "item_reference": (),
}
"""Type of an item -> the fields of it that are read."""


def unread_in_items(items: Sequence[Json]) -> tuple[str, ...]:
    """What chat messages have no place for: fields that are not read, such as encrypted reasoning."""
    found: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        found |= unread(item, _READ[kind])
        if kind == "reasoning":
            found |= {"summary"} if item.get("content") and item.get("summary") else set()
        else:
            found |= unread_in_parts(item.get("content" if kind == "message" else "output"))
    return tuple(sorted(f"input.{name}" for name in found))


def _add(said: _Said, where: str, item: Json, history: History) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(said, where, item)
        case "reasoning":
            said.reply_part("reasoning_content", _reasoning(where, item))
        case "function_call":
            said.reply_part("tool_calls", [_call(where, item)])
        case "function_call_output":
            content = content_in_form(f"{where}.output", item.get("output"))
            call_id = _call_id(where, item)
            said.add({"role": "tool", "tool_call_id": call_id, "content": content})
        case "item_reference":
            _add_reference(said, where, item.get("id"), history)
        case kind:
            text = f"{where}.type is {shown(kind)}, which is not served: send messages, reasoning, calls"
            raise RequestError(400, "content_not_served", text)


def _add_message(said: _Said, where: str, item: Json) -> None:
    role = item.get("role")
    if role not in ROLES:
        text = f"{where}.role is {shown(role)}: use one of {', '.join(ROLES)}"
        raise RequestError(400, "unknown_role", text)
    content = content_in_form(f"{where}.content", item.get("content"))
    if role != "assistant":
        said.add({"role": role, "content": content})
    elif isinstance(content, str):
        said.reply_part("content", content)
    else:
        raise RequestError(400, "content_not_served", f"{where}.content holds an image: send text")


def _call(where: str, item: Json) -> Json:
    sent = item.get("arguments")
    arguments = sent if isinstance(sent, str) else arguments_in_form(f"{where}.arguments", sent)
    function = {"name": text_of(where, item, "name"), "arguments": arguments}
    return {"id": _call_id(where, item), "type": "function", "function": function}


def _call_id(where: str, item: Json) -> str | None:
    if not isinstance(item.get("call_id"), str | None):
        raise refused(f"{where}.call_id", item["call_id"], "send a text")
    return item.get("call_id")


def _add_reference(said: _Said, where: str, item_id: Any, history: History) -> None:
    turn_id = turn_of(item_id)
    earlier = None if turn_id is None else history(turn_id)
    if earlier is None:
        text = f"{where}: {shown(item_id)} is no item of this trajectory"
        raise RequestError(404, "unknown_item", text)
    reply = earlier.reply
    if item_id.startswith("rs_"):
        said.reply_part("reasoning_content", reply.get("reasoning_content") or "")
    elif item_id.startswith("msg_"):
        said.reply_part("content", reply.get("content") or "")
    else:
        calls = reply.get("tool_calls") or []
        index = call_index(item_id)
        if index >= len(calls):
            raise RequestError(404, "unknown_item", f"{where}: {item_id!r} is no item of this trajectory")
        said.reply_part("tool_calls", [calls[index]])


def _reasoning(where: str, item: Json) -> str:
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise refused(f"{where}.{name}", parts, "send a list of texts")
    texts = []
    for place, part in enumerate(parts):
        if not isinstance(part, dict | str):
            raise refused(f"{where}.{name}[{place}]", part, "send an object with a text")
        texts.append(part if isinstance(part, str) else text_of(f"{where}.{name}[{place}]", part))
    return "".join(texts)
