"""What OpenAI's APIs have in common in their replies: usage, finish reasons. Pure."""

from __future__ import annotations

from rollbook.ingest.turns.completed import CompletedTurn, usage_tokens
from rollbook.store.events import Json

MODEL = "rollbook"
"""What a reply calls the model where the request named none."""


def chat_usage(turns: list[CompletedTurn]) -> Json:
    """Token counts; the prompt, which siblings share, counts once."""
    asked, sampled = usage_tokens(turns)
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def finish_of(turn: CompletedTurn) -> str:
    """OpenAI's finish reason; it has none for an aborted turn."""
    reason = turn.completed.finish_reason
    return "stop" if reason == "abort" else reason
