"""Completions as chunks. Pure."""

from __future__ import annotations

from rollbook.ingest.endpoints.completions.reply import PREFIX, token_logprobs
from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of
from rollbook.ingest.endpoints.sse import DONE, event
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn, created_s
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


class CompletionsWriter:
    """Chunks of text, then the finish of each choice."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._call, self._tokenizer = call, tokenizer
        self._usage = bool((call.fields.stream_options or {}).get("include_usage"))
        self._head = {
            "id": PREFIX + turn_ids[0],
            "object": "text_completion",
            "created": created_s(turn_ids[0]),
            "model": call.fields.model or MODEL,
        }

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """A chunk of text."""
        wanted = tokens if self._call.logprobs else []
        if not content and not wanted:
            return b""
        return self._chunk(choice, content, token_logprobs(wanted, self._tokenizer) if wanted else None)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """The finish of each choice, the usage if it was asked for, and the terminator."""
        parts = [self._chunk(i, "", finish=finish_of(turn)) for i, turn in enumerate(turns)]
        if self._usage:
            parts.append(event(self._head | {"choices": [], "usage": chat_usage(turns)}))
        return b"".join([*parts, DONE])

    def failed(self, error: Json) -> bytes:
        """An error where a chunk would be."""
        return event(error)

    def _chunk(self, index: int, text: str, logprobs: Json | None = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event(self._head | {"choices": [choice]})
