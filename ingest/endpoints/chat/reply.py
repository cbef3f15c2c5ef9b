"""A chat reply as one object. Pure."""

from __future__ import annotations

from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.rewards import RESPONSE_PREFIX
from rollbook.ingest.turns.completed import CompletedTurn, logprob_entry
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The reply, with every field that some client insists on."""
    return {
        "id": RESPONSE_PREFIX + turns[0].turn_id,
        "object": "chat.completion",
        "created": turns[0].created,
        "model": call.fields.model or MODEL,
        "choices": [_choice(call, index, turn, tokenizer) for index, turn in enumerate(turns)],
        "usage": chat_usage(turns),
    }


def _choice(call: ModelCall, index: int, turn: CompletedTurn, tokenizer: ChatTokenizer) -> Json:
    return {
        "index": index,
        "message": turn.reply | {"refusal": None},
        "logprobs": _logprobs(turn, tokenizer) if call.logprobs else None,
        "finish_reason": finish_of(turn),
    }


def _logprobs(turn: CompletedTurn, tokenizer: ChatTokenizer) -> Json | None:
    done = turn.completed
    if done.logprobs is None:
        return None
    pairs = zip(done.completion_ids.tolist(), done.logprobs.tolist(), strict=True)
    return {"content": [logprob_entry(tokenizer, i, p) for i, p in pairs], "refusal": None}
