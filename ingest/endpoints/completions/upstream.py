"""Completions as they pass to an upstream: a request may hold several prompts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollbook.ingest.endpoints.api import UpstreamForm
from rollbook.ingest.endpoints.completions.read import PATH, read
from rollbook.ingest.endpoints.history import no_history
from rollbook.ingest.endpoints.lenient import loose_fields
from rollbook.ingest.endpoints.openai_choices import LAST_EVENT, gather, read_reply
from rollbook.ingest.endpoints.upstream_reply import (
    MOST_CHOICES,
    AskedPrompts,
    asked_count,
    one_conversation,
)
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json


def read_call(body: Json) -> ModelCall:
    """The request, its prompt as a message of the role `prompt`, however it is written."""
    try:
        call = read(body, no_history)
    except RequestError:
        sent, rest = body.get("prompt", []), {k: v for k, v in body.items() if k != "prompt"}
        if not isinstance(sent, str | list):
            return ModelCall(PATH, [], None, loose_fields(body), rest, items=[sent])
        return ModelCall(PATH, [_prompt_message(sent)], None, loose_fields(body), rest)
    return replace(call, messages=[_prompt_message(body["prompt"])], prompt=None)


def _prompt_message(prompt: Any) -> Json:
    return {"role": "prompt", "content": prompt}


def asked_prompts(call: ModelCall) -> AskedPrompts:
    """The prompts of a request, and how often each is to be completed."""
    one, (counted, each) = one_conversation(call), asked_count(call)
    raw = _several(call.messages)
    if not raw:
        return one
    if not counted or len(raw) * each > MOST_CHOICES or len({type(prompt) for prompt in raw}) > 1:
        return AskedPrompts([call.messages], len(raw) * each, certain=False)
    return AskedPrompts([[_prompt_message(prompt)] for prompt in raw], each, one.certain)


def _several(messages: Sequence[Json]) -> list[Any]:
    """The prompts, where there are several; ids are numbers, and together one."""
    prompt = messages[0].get("content") if messages and messages[0].get("role") == "prompt" else None
    several = isinstance(prompt, list) and len(prompt) > 1 and any(isinstance(p, str | list) for p in prompt)
    return prompt if several and isinstance(prompt, list) else []


UPSTREAM = UpstreamForm(
    read=lambda body, known: read_call(body),
    reply=read_reply,
    gather=gather,
    last_event=LAST_EVENT,
    paths=(f"POST {PATH}",),
    prompts=asked_prompts,
    takes_fields=True,
)
