"""An Anthropic reply as events: blocks one after another, each opened, filled and closed. Pure."""

from __future__ import annotations

from rollbook.ingest.endpoints.messages.reply import PREFIX, stop_reason, tool_block
from rollbook.ingest.endpoints.openai_form import MODEL
from rollbook.ingest.endpoints.sse import event
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


class MessagesWriter:
    """message_start, content blocks, message_delta, message_stop."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._call, self._turn_id, self._model = call, turn_ids[0], call.fields.model or MODEL
        self._index = -1
        self._open = ""

    def begin(self) -> bytes:
        """The message without content. The length of its prompt is in the last event."""
        message: Json = {
            "id": PREFIX + self._turn_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return self._event("message_start", message=message)

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """More of the thinking or of the text."""
        parts = []
        if reasoning:
            parts.append(self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta({"type": "thinking_delta", "thinking": reasoning}))
        if content:
            parts.append(self._enter("text", {"type": "text", "text": ""}))
            parts.append(self._delta({"type": "text_delta", "text": content}))
        return b"".join(parts)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """Tool uses, why it stopped, and the usage."""
        turn = turns[0]
        parts = [self._leave()]
        for call in turn.calls:
            block = tool_block(call)
            parts.append(self._enter(block["id"], block | {"input": {}}))
            arguments = call["function"]["arguments"]
            parts.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
            parts.append(self._leave())
        reason, stopped_by = stop_reason(turn, self._call)
        usage = {
            "input_tokens": turn.completed.prompt_length,
            "output_tokens": len(turn.completed.completion_ids),
        }
        delta = {"stop_reason": reason, "stop_sequence": stopped_by}
        parts.append(self._event("message_delta", delta=delta, usage=usage))
        return b"".join([*parts, self._event("message_stop")])

    def failed(self, error: Json) -> bytes:
        """An error event."""
        return event(error, "error")

    def _enter(self, block: str, start: Json) -> bytes:
        """Open a block, unless it is open."""
        if self._open == block:
            return b""
        before = self._leave()
        self._index += 1
        self._open = block
        return before + self._event("content_block_start", index=self._index, content_block=start)

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": self._turn_id})
        self._open = ""
        return signature + self._event("content_block_stop", index=self._index)

    def _delta(self, delta: Json) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _event(self, kind: str, **fields: object) -> bytes:
        return event({"type": kind} | fields, kind)
