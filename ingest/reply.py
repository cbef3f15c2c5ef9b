"""From sampled ids to the assistant message that goes out. Pure.

Tool calls are read in the Hermes/Qwen form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
and only when the request offered tools. A malformed call goes out as content, flagged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NoReturn

import orjson

from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.events import Json, TokenIds

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reply:
    """The message as sent, the OpenAI finish reason, and flags for the log."""

    message: Json
    finish_reason: str
    flags: list[str]


def read_reply(
    tokenizer: ChatTokenizer, ids: TokenIds, finish: str, *, tools_offered: bool, turn_id: str
) -> Reply:
    """The reply that a completion says.

    Args:
        ids: the completion, its end-of-turn token included if there is one.
        finish: the engine's reason, stop or length.
        turn_id: call ids are minted from it, so that echoes name the turn.
    """
    body = ids[:-1] if len(ids) and int(ids[-1]) in tokenizer.stop_ids else ids
    text = tokenizer.decode(body)
    if tools_offered and "<tool_call>" in text:
        calls = _calls(text, turn_id)
        if calls is None:
            return Reply({"role": "assistant", "content": text}, finish, ["malformed_tool_call"])
        content = text[: text.index("<tool_call>")].strip() or None
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        return Reply(message, "tool_calls" if finish == "stop" else finish, [])
    return Reply({"role": "assistant", "content": text}, finish, [])


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _calls(text: str, turn_id: str) -> list[Json] | None:
    bodies = _CALL.findall(text)
    if len(bodies) != text.count("<tool_call>"):
        return None
    calls = []
    for index, body in enumerate(bodies):
        try:
            call = json.loads(body, parse_constant=_no_json)
            name, arguments = call["name"], call["arguments"]
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            orjson.dumps(function)  # an escaped half of a surrogate pair could not be sent or stored
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append({"id": f"call-{turn_id}-{index}", "type": "function", "function": function})
    return calls
