"""Completions as one object. Pure."""

from __future__ import annotations

from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json

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
