"""What OpenAI's APIs have in common: usage, finish reasons, what a request gives the chat template. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.fields import SamplingFields
from rollbook.ingest.tokens.chat_template import check_template_kwargs
from rollbook.ingest.turns.in_flight import CompletedTurn, usage_tokens
from rollbook.store.events import Json

MODEL = "rollbook"
"""What a reply calls the model where the request named none."""


def chat_usage(turns: list[CompletedTurn]) -> Json:
    """Token counts; the prompt, which siblings share, counts once."""
    prompt, sampled = usage_tokens(turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_of(turn: CompletedTurn) -> str:
    """OpenAI's finish reason; it has none for an aborted turn."""
    reason = turn.completed.finish_reason
    return "stop" if reason == "abort" else reason


def template_kwargs(fields: SamplingFields, effort: Any = None) -> Json:
    """vLLM's and SGLang's `chat_template_kwargs`, and OpenAI's reasoning effort.

    Raises:
        RequestError: 400, a name is not free.
    """
    kwargs = dict(fields.chat_template_kwargs or {})
    check_template_kwargs(kwargs)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs
