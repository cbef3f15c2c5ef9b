"""A Responses reply as events: items one after another, each added, filled and done. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.openai_form import MODEL
from rollbook.ingest.endpoints.responses.reply import (
    call_item,
    message_item,
    output_items,
    reasoning_item,
    response_body,
    response_head,
    text_part,
)
from rollbook.ingest.endpoints.sse import event
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


class ResponsesWriter:
    """response.created, items with their deltas, response.completed."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._request, self._model, self._turn_id = call.rest, call.fields.model or MODEL, turn_ids[0]
        self._number = 0
        self._index = -1
        self._open = ""
        self._text = ""

    def begin(self) -> bytes:
        """The response without output."""
        head = response_head(self._request, self._model, self._turn_id)
        return self._event("response.created", response=head) + self._event(
            "response.in_progress", response=head
        )

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """More of the reasoning or of the message."""
        parts = []
        if reasoning:
            parts += [self._enter("reasoning"), self._delta("response.reasoning_text.delta", reasoning)]
        if content:
            parts += [self._enter("message"), self._delta("response.output_text.delta", content, logprobs=[])]
        return b"".join(parts)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """What is open is closed, calls follow, and the whole response."""
        turn = turns[0]
        if not turn.reply.get("content") and not turn.calls:
            parts = [self._enter("message"), self._leave()]
        else:
            parts = [self._leave()]
        for item in output_items(turn):
            if item["type"] == "function_call":
                parts.append(self._call(turn, item))
        whole = response_body(self._request, self._model, turn)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return b"".join([*parts, self._event(kind, response=whole)])

    def failed(self, error: Json) -> bytes:
        """An error event."""
        said = error["error"]
        return self._event("error", code=said["code"], message=said["message"], param=None)

    def _call(self, turn: CompletedTurn, item: Json) -> bytes:
        self._index += 1
        place = {"output_index": self._index, "item_id": item["id"]}
        number = int(item["id"].rpartition("_")[2])
        started = call_item(turn.turn_id, number, turn.calls[number], "", "in_progress")
        arguments = item["arguments"]
        return b"".join(
            [
                self._event("response.output_item.added", output_index=self._index, item=started),
                self._event("response.function_call_arguments.delta", delta=arguments, **place),
                self._event(
                    "response.function_call_arguments.done", arguments=arguments, name=item["name"], **place
                ),
                self._event("response.output_item.done", output_index=self._index, item=item),
            ]
        )

    def _item(self, text: str | None, status: str) -> Json:
        made = reasoning_item if self._open == "reasoning" else message_item
        return made(self._turn_id, text, status)

    def _part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else text_part(text)

    def _enter(self, what: str) -> bytes:
        """Open an item, unless it is open."""
        if self._open == what:
            return b""
        before = self._leave()
        self._index += 1
        self._open, self._text = what, ""
        added = self._event(
            "response.output_item.added", output_index=self._index, item=self._item(None, "in_progress")
        )
        return before + added + self._placed("response.content_part.added", part=self._part(""))

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        name = "reasoning_text" if self._open == "reasoning" else "output_text"
        extra: Json = {} if self._open == "reasoning" else {"logprobs": []}
        parts = [
            self._placed(f"response.{name}.done", text=self._text, **extra),
            self._placed("response.content_part.done", part=self._part(self._text)),
            self._event(
                "response.output_item.done",
                output_index=self._index,
                item=self._item(self._text, "completed"),
            ),
        ]
        self._open = ""
        return b"".join(parts)

    def _delta(self, kind: str, text: str, **extra: Any) -> bytes:
        self._text += text
        return self._placed(kind, delta=text, **extra)

    def _placed(self, kind: str, **fields: Any) -> bytes:
        item_id = ("rs_" if self._open == "reasoning" else "msg_") + self._turn_id
        return self._event(kind, output_index=self._index, item_id=item_id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = event({"type": kind, "sequence_number": self._number} | fields, kind)
        self._number += 1
        return made
