"""OpenAI's completions: a raw prompt, as text or as token ids.

No chat template shapes the prompt. In this order: requests, replies as one object and as chunks, and both as
they pass to an upstream, where a request may hold several prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollbook.edge.errors import openai_error
from rollbook.edge.server_sent_events import DONE, event
from rollbook.ingest.endpoints.api import AgentApi, History, UpstreamForm, no_history
from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of
from rollbook.ingest.endpoints.upstream_choices import LAST_EVENT, gather, loose_fields, read_reply
from rollbook.ingest.endpoints.upstream_reply import MOST_CHOICES, AskedPrompts, asked_count, one_conversation
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import refused
from rollbook.ingest.turns.in_flight import CompletedTurn, created_s
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
    if any(isinstance(entry, str | list) for entry in prompt):
        text = f"prompt: {len(prompt)} prompts: send one a request, or n for several completions of one"
        raise RequestError(400, "bad_prompt", text)
    for index, token_id in enumerate(prompt):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise refused(f"prompt[{index}]", token_id, "send ids of tokens, from 0", "bad_prompt")
    return token_ids(prompt)


PREFIX = "cmpl-"


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The completions."""
    return {
        "id": PREFIX + turns[0].turn_id,
        "object": "text_completion",
        "created": turns[0].created,
        "model": call.fields.model or MODEL,
        "choices": [_choice(call, i, turn, tokenizer) for i, turn in enumerate(turns)],
        "usage": chat_usage(turns),
    }


def token_logprobs(tokens: list[tuple[int, float]], tokenizer: ChatTokenizer) -> Json:
    """Logprobs as this endpoint lists them."""
    texts = [tokenizer.decode([i], special=True) for i, _ in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [p for _, p in tokens],
        "top_logprobs": None,
        "text_offset": [],
    }


def _choice(call: ModelCall, index: int, turn: CompletedTurn, tokenizer: ChatTokenizer) -> Json:
    done = turn.completed
    logprobs = None
    if call.logprobs and done.logprobs is not None:
        pairs = list(zip(done.completion_ids.tolist(), done.logprobs.tolist(), strict=True))
        logprobs = token_logprobs(pairs, tokenizer)
    extra = {"token_ids": done.completion_ids.tolist()} if call.rest.get("return_token_ids") else {}
    return {
        "index": index,
        "text": turn.reply["content"],
        "logprobs": logprobs,
        "finish_reason": finish_of(turn),
    } | extra


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
    single, (counted, each) = one_conversation(call), asked_count(call)
    raw = _several(call.messages)
    if not raw:
        return single
    if not counted or len(raw) * each > MOST_CHOICES or len({type(prompt) for prompt in raw}) > 1:
        return AskedPrompts([call.messages], len(raw) * each, certain=False)
    return AskedPrompts([[_prompt_message(prompt)] for prompt in raw], each, single.certain)


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


API = AgentApi(
    path=PATH,
    conversation="prompt",
    read=read,
    reply=reply,
    writer=CompletionsWriter,
    error=openai_error,
    upstream=UPSTREAM,
)
