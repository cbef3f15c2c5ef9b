"""What a request gives the chat template besides messages and tools. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.requests.fields import SamplingFields
from rollbook.ingest.tokens.chat_template import check_template_kwargs
from rollbook.store.events import Json


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
