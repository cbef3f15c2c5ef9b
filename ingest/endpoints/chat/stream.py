"""A chat reply as chunks. Pure."""

from __future__ import annotations

import orjson

from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of
from rollbook.ingest.endpoints.sse import DONE, event
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.rewards import RESPONSE_PREFIX
from rollbook.ingest.turns.completed import CompletedTurn, created_s, logprob_entry
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


class ChatWriter:
    """Chunks: the role first, text as it comes, calls and the finish at the end."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._call, self._tokenizer, self._choices = call, tokenizer, len(turn_ids)
        self._usage = bool((call.fields.stream_options or {}).get("include_usage"))
        self._head = {
            "id": RESPONSE_PREFIX + turn_ids[0],
            "object": "chat.completion.chunk",
            "created": created_s(turn_ids[0]),
            "model": call.fields.model or MODEL,
        }

    def begin(self) -> bytes:
        """A chunk with the role for each choice."""
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._choices)
        )

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """A chunk of text."""
        delta: Json = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        entries = [logprob_entry(self._tokenizer, i, p) for i, p in tokens] if self._call.logprobs else []
        if not delta and not entries:
            return b""
        return self._chunk(choice, delta, {"content": entries, "refusal": None} if entries else None)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """Calls, the finish of each choice, the usage if it was asked for, and the terminator."""
        parts = []
        for index, turn in enumerate(turns):
            calls = [{"index": i} | call for i, call in enumerate(turn.calls)]
            if calls:
                parts.append(self._chunk(index, {"tool_calls": calls}))
            parts.append(self._chunk(index, {}, finish=finish_of(turn)))
        if self._usage:
            parts.append(event(self._head | {"choices": [], "usage": chat_usage(turns)}))
        return b"".join([*parts, DONE])

    def failed(self, error: Json) -> bytes:
        """An error where a chunk would be."""
        return event(error)

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._usage else {}
        return b"data: " + orjson.dumps(self._head | {"choices": [choice]} | usage) + b"\n\n"
