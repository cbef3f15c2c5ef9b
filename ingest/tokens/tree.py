"""The tree of turns: which turn a request extends, and the exact ids to send. Pure.

Matching goes by a hash chain over the messages' normal form, deepest turn first; the ids of the
matched turn are kept as they are and a bridge is appended. See `ingest.bridge` for what makes a root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollbook.ingest.tokens.bridge import NoBridge, bridge
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.normal_form import chain, chain_all
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class TreeTurn:
    """A completed turn as a possible parent: what was asked, what was answered, and all its ids."""

    turn_id: str
    context_key: str
    messages: list[Json]
    reply: Json
    ids: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a request is sent: `prompt_ids` whole, of which the last `delta_ids` are new.

    The request's messages are the first `shared_messages` of `base`'s, then the rest. `echoed` is the
    turn whose reply the client showed, whether it could be extended or not.
    """

    parent: TreeTurn | None
    echoed: TreeTurn | None
    root_reason: str | None
    prompt_ids: TokenIds
    delta_ids: TokenIds
    base: TreeTurn | None
    shared_messages: int


@dataclass(slots=True)
class TurnTree:
    """The completed turns of one trajectory, indexed by the messages that lead up to each."""

    turns: list[TreeTurn] = field(default_factory=list)
    _by_tip: dict[bytes, list[TreeTurn]] = field(default_factory=dict)

    def add(self, turn: TreeTurn) -> None:
        """Index a completed turn by its request and reply."""
        tip = chain(chain_all(turn.messages)[-1], turn.reply)
        self.turns.append(turn)
        self._by_tip.setdefault(tip, []).append(turn)

    def parents(self, messages: list[Json], context_key: str) -> list[tuple[int, TreeTurn]]:
        """(messages covered, turn) of every turn these messages go on from, best first."""
        hashes = chain_all(messages)
        found: list[tuple[int, TreeTurn]] = []
        for covered in range(len(messages) - 1, 0, -1):
            turns = self._by_tip.get(hashes[covered], ())
            same = [t for t in reversed(turns) if t.context_key == context_key]
            # Twins (equal replies, other tokens) are told apart by the call ids that clients echo.
            echoed = _call_ids(messages[covered - 1])
            same.sort(key=lambda t: _call_ids(t.reply) != echoed)
            found += [(covered, t) for t in same]
        return found

    def base(self, messages: Sequence[Json], parent: TreeTurn | None) -> tuple[TreeTurn | None, int]:
        """The turn whose request to store this one against, and how many messages they share."""
        base = parent or (self.turns[-1] if self.turns else None)
        if base is None:
            return None, 0
        shared = 0
        for old, new in zip(base.messages, messages, strict=False):
            if old != new:
                break
            shared += 1
        return (base, shared) if shared else (None, 0)


def _call_ids(message: Json) -> set[str | None]:
    return {call.get("id") for call in message.get("tool_calls") or ()}


def context_key(tools: Sequence[Json] | None, template_digest: str, tokenizer_digest: str) -> str:
    """Digest of what shapes a prompt besides its messages; turns extend only within one context."""
    return digest_json([list(tools or ()), template_digest, tokenizer_digest])


def plan_turn(
    tree: TurnTree,
    tokenizer: ChatTokenizer,
    messages: list[Json],
    tools: Sequence[Json] | None,
    key: str,
    *,
    may_extend: bool = True,
) -> Plan:
    """Decide the parent and the ids of a request.

    Raises:
        RequestError: 400, the chat template refuses the messages.
    """
    refused: str | None = None
    candidates = tree.parents(messages, key) if may_extend else []
    for covered, turn in candidates:
        new = messages[covered:]
        ids = bridge(tokenizer, turn.messages, turn.reply, new, tools, int(turn.ids[-1]))
        if isinstance(ids, NoBridge):
            refused = refused or ids.reason  # the deepest turn's: shallower ones lack what it said
            continue
        base, shared = tree.base(messages, turn)
        return Plan(turn, turn, None, np.concatenate([turn.ids, ids]), ids, base, shared)
    ids = tokenizer.encode(tokenizer.render(messages, tools, generate=True))
    base, shared = tree.base(messages, None)
    unmatched = "no_matching_turn" if tree.turns else "first_turn"
    reason = (refused or unmatched) if may_extend else "extension_refused"
    echoed = candidates[0][1] if candidates else None
    return Plan(None, echoed, reason, ids, ids, base, shared)
