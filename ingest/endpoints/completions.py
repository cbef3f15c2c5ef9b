"""OpenAI's completions: a raw prompt, as text or as token ids. No chat template shapes it. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.chat import MODEL, chat_usage, finish_of
from rollbook.ingest.endpoints.history import History
from rollbook.ingest.endpoints.openai_error import openai_error
from rollbook.ingest.endpoints.sse import DONE, event
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import refused
from rollbook.ingest.turns.completed import CompletedTurn, created_s
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TokenIds, token_ids

PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


class Completions:
    """POST /v1/completions."""

    path = "/v1/completions"

    def read(self, body: Json, history: History) -> ModelCall:
        """A request for the continuation of one prompt.

        Raises:
            RequestError: 400, it is none.
        """
        fields = validated(SamplingFields, {k: v for k, v in body.items() if k != "logprobs"})
        if fields.max_tokens is None:
            fields = fields.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
        return ModelCall(
            endpoint=self.path,
            messages=[],
            tools=None,
            fields=fields,
            rest={k: v for k, v in body.items() if k != "prompt"},
            prompt=_prompt(body.get("prompt")),
            logprobs=body.get("logprobs") not in (None, False),
            not_honoured=tuple(k for k in ("suffix", "echo") if body.get(k)),
        )

    def reply(self, call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
        """The completions."""
        return {
            "id": PREFIX + turns[0].turn_id,
            "object": "text_completion",
            "created": turns[0].created,
            "model": call.fields.model or MODEL,
            "choices": [_choice(call, i, turn, tokenizer) for i, turn in enumerate(turns)],
            "usage": chat_usage(turns),
        }

    def writer(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> CompletionsWriter:
        """What writes them as chunks."""
        return CompletionsWriter(call, turn_ids, tokenizer)

    def error(self, status: int, code: str, message: str) -> Json:
        """An error in OpenAI's form."""
        return openai_error(status, code, message)


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


def _logprobs(tokens: list[tuple[int, float]], tokenizer: ChatTokenizer) -> Json:
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
        logprobs = _logprobs(pairs, tokenizer)
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
        return self._chunk(choice, content, _logprobs(wanted, self._tokenizer) if wanted else None)

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
