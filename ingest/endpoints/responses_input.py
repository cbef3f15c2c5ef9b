"""Items of a Responses request as chat messages. Pure.

What the model said comes as several items: reasoning, a message, calls. Those that follow one another are one
assistant message, as long as they can be of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollbook.ingest.endpoints.history import History
from rollbook.ingest.endpoints.responses_wire import call_index, turn_of
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

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
            raise RequestError(400, "bad_request", f"input[{index}]: send an object")
        _add(said, f"input[{index}]", item, history)
    return said.messages


def _add(said: _Said, where: str, item: Json, history: History) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            said.reply_part("content", _text(where, item.get("content")))
        case "message":
            said.add({"role": item.get("role"), "content": _content(where, item.get("content"))})
        case "reasoning":
            said.reply_part("reasoning_content", _reasoning(item))
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            said.reply_part("tool_calls", [call])
        case "function_call_output":
            content = _content(where, item.get("output"))
            said.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "item_reference":
            _add_reference(said, where, item.get("id"), history)
        case kind:
            text = f"{where}: an item of type {kind!r} is not served: send messages, reasoning, calls"
            raise RequestError(400, "content_not_served", text)


def _add_reference(said: _Said, where: str, item_id: Any, history: History) -> None:
    turn_id = turn_of(item_id)
    earlier = None if turn_id is None else history(turn_id)
    if earlier is None:
        text = f"{where}: {item_id!r} is no item of this trajectory"
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


def _reasoning(item: Json) -> str:
    parts = item.get("content") or item.get("summary")
    if not isinstance(parts, list):
        return ""
    return "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))


def _text(where: str, content: Any) -> str:
    """What an assistant's message says."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = _content(where, content)
    return parts if isinstance(parts, str) else "".join(str(p.get("text", "")) for p in parts)


def _content(where: str, content: Any) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(p, dict) for p in content):
        raise RequestError(400, "bad_request", f"{where}.content: send a text or a list of parts")
    parts = [_part(where, part) for part in content]
    if all(p["type"] == "text" for p in parts):
        return "".join(p["text"] for p in parts)
    return parts


def _part(where: str, part: Json) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text" | "summary_text":
            return {"type": "text", "text": str(part.get("text", ""))}
        case "refusal":
            return {"type": "text", "text": str(part.get("refusal", ""))}
        case "input_image" if part.get("image_url"):
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
        case kind:
            text = f"{where}: a part of type {kind!r} is not served: send text, or images by image_url"
            raise RequestError(400, "content_not_served", text)
