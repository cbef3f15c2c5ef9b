"""What a Responses reply is made of, whole or streamed; ids of its items name the turn. Pure."""

from __future__ import annotations

import re
from typing import Any

from rollbook.ingest.endpoints.openai_form import MODEL
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn, created_s
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json

PREFIX = "resp_"
_ID = re.compile(r"(?:resp|rs|msg|fc)_(?P<turn>[0-9a-f-]{36})(?:_(?P<index>\d+))?")


def turn_of(item_id: Any) -> str | None:
    """The turn whose response, or part of one, has this id; None if it is none of ours."""
    found = _ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if found is None else found["turn"]


def call_index(item_id: str) -> int:
    """Which of its turn's calls an item is."""
    found = _ID.fullmatch(item_id)
    return int(found["index"] or 0) if found else 0


def reasoning_item(turn_id: str, text: str | None, status: str = "completed") -> Json:
    """A reasoning item; None: not filled yet."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(turn_id: str, text: str | None, status: str = "completed") -> Json:
    """A message item; None: not filled yet."""
    content = [] if text is None else [text_part(text)]
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str) -> Json:
    """Text of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(turn_id: str, index: int, call: Json, arguments: str, status: str = "completed") -> Json:
    """A function call."""
    return {
        "id": f"fc_{turn_id}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": arguments,
        "status": status,
    }


def output_items(turn: CompletedTurn) -> list[Json]:
    """Reasoning, message and calls, those that there are; an empty reply is an empty message."""
    reply, turn_id = turn.reply, turn.turn_id
    items: list[Json] = []
    if reply.get("reasoning_content"):
        items.append(reasoning_item(turn_id, reply["reasoning_content"]))
    if reply.get("content") or not turn.calls:
        items.append(message_item(turn_id, reply.get("content") or ""))
    return items + [call_item(turn_id, i, c, c["function"]["arguments"]) for i, c in enumerate(turn.calls)]


def response_head(request: Json, model: str, turn_id: str) -> Json:
    """A response that is not answered yet."""
    echoed = {
        name: request.get(name)
        for name in ("instructions", "metadata", "previous_response_id", "temperature", "top_p", "reasoning")
    }
    return {
        "id": PREFIX + turn_id,
        "object": "response",
        "created_at": created_s(turn_id),
        "status": "in_progress",
        "model": model,
        "output": [],
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "text": request.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        "max_output_tokens": request.get("max_output_tokens"),
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **echoed,
    }


def response_body(request: Json, model: str, turn: CompletedTurn) -> Json:
    """The whole response."""
    done = turn.completed
    asked, sampled = done.prompt_length, len(done.completion_ids)
    cut_off = done.finish_reason == "length"
    return response_head(request, model, turn.turn_id) | {
        "status": "incomplete" if cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": output_items(turn),
        "usage": {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + sampled,
        },
    }


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The whole response to a request."""
    return response_body(call.rest, call.fields.model or MODEL, turns[0])
