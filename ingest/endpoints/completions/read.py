"""A request for the continuation of a raw prompt, text or token ids, which no chat template shapes. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.history import History
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.tokens.message_form import refused
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TokenIds, token_ids

PATH = "/v1/completions"
OWN_FIELDS = frozenset(["prompt", "n", "stop", "max_tokens", "max_completion_tokens", "echo"])
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


def read(body: Json, history: History) -> ModelCall:
    """A request for the continuation of one prompt.

    Raises:
        RequestError: 400, it is none.
    """
    fields = validated(SamplingFields, {k: v for k, v in body.items() if k != "logprobs"})
    if fields.max_tokens is None:
        fields = fields.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
    return ModelCall(
        endpoint=PATH,
        messages=[],
        tools=None,
        fields=fields,
        rest={k: v for k, v in body.items() if k != "prompt"},
        prompt=_prompt(body.get("prompt")),
        logprobs=body.get("logprobs") not in (None, False),
        not_honoured=tuple(k for k in ("suffix", "echo") if body.get(k)),
        own_fields=OWN_FIELDS,
    )


def _prompt(prompt: Any) -> str | TokenIds:
    """One prompt; a list of one is taken for its entry.

    Raises:
        RequestError: 400, it is none, or several, or holds what is no id.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        text = "prompt: send a text or a list of token ids that is not empty"
        raise RequestError(400, "bad_prompt", text)
    if any(isinstance(one, str | list) for one in prompt):
        text = f"prompt: {len(prompt)} prompts: send one a request, or n for several completions of one"
        raise RequestError(400, "bad_prompt", text)
    for index, token_id in enumerate(prompt):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise refused(f"prompt[{index}]", token_id, "send ids of tokens, from 0", "bad_prompt")
    return token_ids(prompt)
