"""What an Anthropic reply is made of, whole or streamed. Pure."""

from __future__ import annotations

import orjson

from rollbook.ingest.endpoints.openai_form import MODEL
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.reply import STOP_STRING
from rollbook.store.events import Json

ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
PREFIX = "msg_"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


def stop_reason(turn: CompletedTurn, call: ModelCall) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence); of several stop sequences the log does not say which one it was."""
    if STOP_STRING in turn.completed.flags and turn.completed.finish_reason == "stop":
        return "stop_sequence", call.stops[0] if len(call.stops) == 1 else None
    return _REASONS.get(turn.completed.finish_reason, "end_turn"), None


def thinking_block(turn_id: str, text: str) -> Json:
    """Clients send thinking back with its signature; ours names the turn."""
    return {"type": "thinking", "thinking": text, "signature": turn_id}


def tool_block(call: Json) -> Json:
    """A tool call."""
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": orjson.loads(function["arguments"] or "{}"),
    }


def reply_blocks(turn: CompletedTurn) -> list[Json]:
    """Thinking, text and tool uses, those that there are."""
    reply = turn.reply
    blocks: list[Json] = []
    if reply.get("reasoning_content"):
        blocks.append(thinking_block(turn.turn_id, reply["reasoning_content"]))
    if reply.get("content"):
        blocks.append({"type": "text", "text": reply["content"]})
    return [*blocks, *(tool_block(call) for call in turn.calls)]


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The message."""
    turn = turns[0]
    reason, stopped_by = stop_reason(turn, call)
    return {
        "id": PREFIX + turn.turn_id,
        "type": "message",
        "role": "assistant",
        "model": call.fields.model or MODEL,
        "content": reply_blocks(turn),
        "stop_reason": reason,
        "stop_sequence": stopped_by,
        "usage": {
            "input_tokens": turn.completed.prompt_length,
            "output_tokens": len(turn.completed.completion_ids),
        },
    }


def error(status: int, code: str, message: str) -> Json:
    """An error in Anthropic's form; `code` is our addition."""
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
