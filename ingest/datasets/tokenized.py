"""Tokens for turns of text: the ids that a model would have read and sampled. Pure, given a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollbook.ingest.replies.written import LEFT_OUT, ReplyWriter, says_nothing
from rollbook.store.errors import ReplyError
from rollbook.store.events import Json, Record, TokenIds, TurnCompleted, TurnRequested
from rollbook.store.fold.trajectory import prompt_sha256

FROM_TEXT = "tokens_from_text"
"""Flag of a turn whose tokens were made of its text: no model sampled them, and they have no logprobs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A turn as it is read on: its request's messages, its whole text, and its whole ids."""

    messages: list[Json]
    text: str
    ids: TokenIds


def tokenized(records: Sequence[Record], writer: ReplyWriter) -> list[Record]:
    """The records of a trajectory of text, its turns with tokens.

    A turn extends its parent where the chat template keeps the parent's text as it was; else it is a root.

    Raises:
        RequestError: the chat template refuses the messages of one of its turns.
        ReplyError: one of its replies says nothing, or what no model of the template samples.
    """
    turns: dict[str, _Turn] = {}
    made: list[Record] = []
    asked: tuple[TurnRequested, list[Json]] | None = None
    for record in records:
        if isinstance(record, TurnRequested):
            base = turns[record.base_turn_id].messages if record.base_turn_id else []
            asked = (record, [*base[: record.shared_messages], *record.messages])
        elif isinstance(record, TurnCompleted):
            assert asked is not None
            made += _with_tokens(*asked, record, turns, writer)
        else:
            made.append(record)
    return made


def _with_tokens(
    asked: TurnRequested,
    messages: list[Json],
    done: TurnCompleted,
    turns: dict[str, _Turn],
    writer: ReplyWriter,
) -> tuple[TurnRequested, TurnCompleted]:
    if says_nothing(done.reply):
        raise ReplyError("the reply says nothing: it has no text, no reasoning and no calls", ("text",))
    request = asked.request
    written = writer.write(messages, request.get("tools"), done.reply, request.get("chat_template_kwargs"))
    prompt, encode = written.prompt, writer.tokenizer.encode
    parent = turns.get(asked.parent_turn_id or "")
    if parent is not None and not prompt.startswith(parent.text):
        parent = None
        asked = replace(asked, parent_turn_id=None, root_reason="no_matching_turn")
    begins = encode(prompt[len(parent.text) :] if parent else prompt)
    whole = np.concatenate([parent.ids, begins]) if parent else begins
    turns[done.turn_id] = _Turn(messages, prompt + written.text, np.concatenate([whole, written.ids]))
    return asked, replace(
        done,
        reply=written.reply,
        prompt_ids=begins,
        completion_ids=written.ids,
        prompt_length=len(whole),
        prompt_sha256=prompt_sha256(whole),
        finish_reason="stop",
        logprob_semantics={"kind": "none", "why": "imported"},
        flags=[FROM_TEXT, *(LEFT_OUT[part] for part in written.left_out)],
    )
