"""The bridge: the ids to append to a parent turn so that new messages follow it. Pure.

It is derived from the chat template: render the parent's request with an assistant message that holds
a sentinel, once alone and once followed by the new messages; what follows the sentinel's end-of-turn
token is the text to append. A bridge only appends. On any doubt it is refused with a reason, and the
request becomes a new root: one more sample, never a wrong token.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TokenIds

SENTINEL = f"sentinel-{secrets.token_hex(8)}"
"""Random per process: text that happens to hold it makes a root, which is safe."""


@dataclass(frozen=True, slots=True)
class NoBridge:
    """Why no ids could be derived; the request becomes a root with this reason."""

    reason: str


def bridge(
    tokenizer: ChatTokenizer,
    parent_messages: Sequence[Json],
    reply: Json,
    new_messages: Sequence[Json],
    tools: Sequence[Json] | None,
    last_id: int,
) -> TokenIds | NoBridge:
    """Ids that follow the parent's completion, or why there are none.

    Args:
        parent_messages: the parent's request, as received.
        reply: the parent's reply, as sent.
        new_messages: what the client added behind it.
        last_id: last id of the parent's completion.
    """
    if any(m.get("role") == "assistant" for m in new_messages):
        return NoBridge("foreign_assistant_message")
    if last_id not in tokenizer.stop_ids:
        return NoBridge("parent_without_end_of_turn")
    stand_in = {"role": "assistant", "content": SENTINEL}
    if reply.get("tool_calls"):
        stand_in["tool_calls"] = reply["tool_calls"]
    try:
        alone = tokenizer.render([*parent_messages, stand_in], tools, generate=False)
        full = tokenizer.render([*parent_messages, stand_in, *new_messages], tools, generate=True)
    except RequestError:
        return NoBridge("template_refuses")
    if alone.count(SENTINEL) != 1 or full.count(SENTINEL) != 1:
        return NoBridge("sentinel_not_rendered_once")
    (head, turn), (full_head, rest) = alone.split(SENTINEL), full.split(SENTINEL)
    if head != full_head:
        return NoBridge("template_rewrites_history")
    if not rest.startswith(turn):
        return NoBridge("template_changes_the_turn")
    end = tokenizer.decode([last_id], special=True)
    stop = turn.rfind(end)
    if stop < 0:
        return NoBridge("no_end_of_turn_in_template")
    return tokenizer.encode(turn[stop + len(end) :] + rest[len(turn) :])


def self_test(tokenizer: ChatTokenizer) -> str | None:
    """Why this tokenizer and template may not extend turns, or None if they may.

    Checks that the end-of-turn token is atomic (ids of text around it are the ids of the two sides),
    and that a derived bridge equals what rendering the whole conversation gives.
    """
    end = tokenizer.decode([tokenizer.stop_ids[0]], special=True)
    for left, right in (("a b", "\nc"), ("x\n", "\n\ny"), ("1", "2"), ("é ", " ü"), ("{", "}")):
        whole = tokenizer.encode(left + end + right).tolist()
        parts = [*tokenizer.encode(left), tokenizer.stop_ids[0], *tokenizer.encode(right)]
        if whole != parts:
            return "end_of_turn_not_atomic"
    asked = [{"role": "user", "content": "one"}]
    reply = {"role": "assistant", "content": "two"}
    new = [{"role": "user", "content": "three"}]
    appended = bridge(tokenizer, asked, reply, new, None, tokenizer.stop_ids[0])
    if isinstance(appended, NoBridge):
        return None  # such turns become roots one by one, each with its reason
    rendered = tokenizer.render([*asked, reply, *new], None, generate=True)
    answered = tokenizer.render([*asked, reply], None, generate=False)
    prefix = answered[: answered.rfind(end) + len(end)]
    ids = [*tokenizer.encode(prefix), *appended]
    if rendered.startswith(prefix) and ids != tokenizer.encode(rendered).tolist():
        return "bridge_differs_from_rendering"
    return None
