"""A completed, durable turn, and what every API's reply takes from it. Pure.

A reply is made from the turn's two events alone, so a retry after a crash gets the same reply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.events import Json, TurnCompleted, TurnRequested

LOWEST = -9999.0
"""The logprob that OpenAI's API gives for a token of probability zero."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletedTurn:
    """One completion: what was asked, what came back."""

    requested: TurnRequested
    completed: TurnCompleted

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.completed.turn_id

    @property
    def reply(self) -> Json:
        """The message, in chat form."""
        return self.completed.reply

    @property
    def created(self) -> int:
        """When it was requested, in seconds, from its id."""
        return created_s(self.turn_id)

    @property
    def calls(self) -> list[Json]:
        """Its tool calls."""
        return self.reply.get("tool_calls") or []


def created_s(turn_id: str) -> int:
    """The time a UUIDv7 was made, in seconds since 1970."""
    return int(UUID(turn_id).int >> 80) // 1000


def usage_tokens(turns: Sequence[CompletedTurn]) -> tuple[int, int]:
    """(tokens of the prompt, tokens sampled), over the siblings of one request."""
    return turns[0].completed.prompt_length, sum(len(t.completed.completion_ids) for t in turns)


def logprob_entry(tokenizer: ChatTokenizer, token_id: int, logprob: float) -> Json:
    """A token as OpenAI's chat completions list it; `token_id` is our addition."""
    text = tokenizer.decode([token_id], special=True)
    value = logprob if math.isfinite(logprob) else LOWEST
    whole = list(text.encode()) if "�" not in text else None
    return {"token": text, "logprob": value, "bytes": whole, "top_logprobs": [], "token_id": token_id}
