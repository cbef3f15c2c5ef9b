"""Raw prompts, which no chat template shapes: text, or ids that may go on from an earlier turn's. Pure."""

from __future__ import annotations

import hashlib

import numpy as np

from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.normal_form import chain_all
from rollbook.ingest.tokens.tree import Plan, TreeTurn, TurnTree, ids_bytes
from rollbook.store.events import Json, TokenIds


def plan_prompt(tree: TurnTree, tokenizer: ChatTokenizer, prompt: str | TokenIds, key: str) -> Plan:
    """The plan of a raw prompt, which no chat template shapes.

    Ids that begin with all ids of an earlier raw turn extend it. Text is a root: what it was tokenized to
    need not begin with what was sampled before.

    Raises:
        RequestError: 400, the text is no Unicode.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    parent = None if isinstance(prompt, str) else _longest_prefix(tree, ids, key)
    if parent is None:
        reason = "text_prompt" if isinstance(prompt, str) else "first_turn"
        if tree.turns and not isinstance(prompt, str):
            reason = "no_matching_turn"
        piece = {"role": "prompt", "content": prompt} if isinstance(prompt, str) else _piece(ids)
        hasher = hashlib.sha256(ids_bytes(ids))
        return Plan(None, None, reason, ids, ids, None, 0, [piece], chain_all([piece]), hasher)
    delta = ids[parent.length :]
    messages = [*parent.messages, _piece(delta)]
    hasher = parent.hasher.copy()
    hasher.update(ids_bytes(delta))
    hashes = chain_all(messages, parent.hashes)
    shared = len(parent.messages)
    return Plan(parent, parent, None, ids, delta, parent, shared, messages, hashes, hasher)


def _piece(ids: TokenIds) -> Json:
    """Ids that a raw prompt adds, as the message that stands for them."""
    return {"role": "prompt", "content": "", "token_ids": ids.tolist()}


def _longest_prefix(tree: TurnTree, ids: TokenIds, key: str) -> TreeTurn | None:
    best: TreeTurn | None = None
    for turn in tree.turns:
        fits = turn.context_key == key and (0 if best is None else best.length) < turn.length < len(ids)
        if fits and np.array_equal(np.concatenate(turn.whole()), ids[: turn.length]):
            best = turn
    return best
