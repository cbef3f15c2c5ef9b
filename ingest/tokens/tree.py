"""The tree of turns: which turn a request extends, and the exact ids to send. Pure.

Matching goes by a hash chain over the messages' normal form, deepest turn first; the ids of the
matched turn are kept as they are and a bridge is appended. See `ingest.tokens.bridge` for what makes a root.

Raw prompts, which no chat template shapes, are text, or ids that may go on from an earlier turn's.

What a chat template leaves out of a request, so that the client learns of it. Pure.

Templates drop things by rules of their own: system messages that are not the first, results without a call,
calls beyond the first, reasoning of earlier turns, tools. Nothing says so but the text they make; so that is
looked through for every text that was sent.
"""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rollbook.ingest.tokens.bridge import Bridges, NoBridge
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import (
    EMPTY,
    REASONING,
    chain,
    chain_all,
    in_form,
    reasoning_fits,
    reasoning_of,
    unread_in_parts,
)
from rollbook.ingest.tokens.template_traits import TemplateTraits, place_of
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, TokenIds

RECENT = 8
"""Turns that are asked which messages they share with a request, the latest first."""


ENDING = 128
"""Characters of a prompt's end, which tell whether the model answers inside a reasoning block."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeTurn:
    """A completed turn as a possible parent: what was asked and answered, and its own part of the ids.

    Attributes:
        ids: what the turn added: its prompt's delta, then its completion.
        length: of the whole prompt and the completion.
        hashes: `chain_all(messages)`.
        hasher: sha256 over the whole prompt and the completion, to go on from.
        cut: the reply ended at a stop string, and its ids may hold more than was shown.
    """

    turn_id: str
    context_key: str
    messages: list[Json]
    reply: Json
    parent: TreeTurn | None
    ids: TokenIds
    length: int
    hashes: list[bytes]
    hasher: Any
    cut: bool = False

    def whole(self) -> list[TokenIds]:
        """The parts that the whole prompt and completion are made of, in order."""
        parts, node = [], self
        while True:
            parts.append(node.ids)
            if node.parent is None:
                return parts[::-1]
            node = node.parent

    def conversation(self) -> list[Json]:
        """The messages and the reply, with the reasoning that was sampled where the client dropped it."""
        conversation, node = [*self.messages, self.reply], self.parent
        while node is not None:
            place, reasoning = len(node.messages), reasoning_of(node.reply)
            if reasoning and not reasoning_of(conversation[place]):
                conversation[place] = conversation[place] | {"reasoning_content": reasoning}
            node = node.parent
        return conversation


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a request is sent: `prompt_ids` whole, of which the last `delta_ids` are new.

    The request's messages are the first `shared_messages` of `base`'s, then the rest. `echoed` is the
    turn whose reply the client showed, whether it could be extended or not. `twins` says that another turn
    fits as well as the parent, and nothing the client sent tells them apart. `left_out` names what the
    chat template does not show of what was sent. `ending` is the end of the prompt's text, behind which the
    model writes; empty for raw prompts.
    """

    parent: TreeTurn | None
    echoed: TreeTurn | None
    root_reason: str | None
    prompt_ids: TokenIds
    delta_ids: TokenIds
    base: TreeTurn | None
    shared_messages: int
    messages: list[Json]
    hashes: list[bytes]
    hasher: Any
    twins: bool = False
    left_out: tuple[str, ...] = ()
    ending: str = ""

    def completed(
        self, turn_id: str, context_key: str, reply: Json, completion: TokenIds, *, cut: bool = False
    ) -> TreeTurn:
        """The turn that this plan became."""
        parts = (self.delta_ids, completion)
        state = (self.messages, self.hashes, reply, self.parent, parts)
        return grown(turn_id, context_key, *state, cut=cut)


def grown(
    turn_id: str,
    context_key: str,
    messages: list[Json],
    hashes: list[bytes],
    reply: Json,
    parent: TreeTurn | None,
    parts: tuple[TokenIds, TokenIds],
    *,
    cut: bool = False,
) -> TreeTurn:
    """A turn behind its parent.

    Args:
        parts: the delta of its prompt, and its completion.
    """
    ids = np.concatenate(parts)
    hasher = hashlib.sha256() if parent is None else parent.hasher.copy()
    hasher.update(ids_bytes(ids))
    length = len(ids) + (0 if parent is None else parent.length)
    return TreeTurn(turn_id, context_key, messages, reply, parent, ids, length, hashes, hasher, cut)


def ids_bytes(ids: TokenIds) -> bytes:
    """Ids as little-endian int32: what digests are over."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A turn that a request goes on from, how many messages it covers, and whether a twin fits as well."""

    covered: int
    turn: TreeTurn
    twins: bool


@dataclass(slots=True)
class TurnTree:
    """The completed turns of one trajectory, indexed by the messages that lead up to each."""

    turns: list[TreeTurn] = field(default_factory=list)
    _by_tip: dict[bytes, list[TreeTurn]] = field(default_factory=dict)
    _by_id: dict[str, TreeTurn] = field(default_factory=dict)

    def add(self, turn: TreeTurn) -> tuple[bytes, bool]:
        """Index a completed turn by its request and reply: the hash that stands for both, and if it is new.

        Turns stand in the order in which they were asked, whichever completed first: so the tree is the same
        when it is read back from the log.
        """
        tip = chain(turn.hashes[-1], turn.reply)
        if turn.turn_id in self._by_id:
            return tip, False
        self._by_id[turn.turn_id] = turn
        insort(self.turns, turn, key=_age_order)
        insort(self._by_tip.setdefault(tip, []), turn, key=_age_order)
        return tip, True

    def tips(self) -> list[bytes]:
        """The hashes that stand for its turns."""
        return list(self._by_tip)

    def by_id(self, turn_id: str) -> TreeTurn | None:
        """The turn of that id."""
        return self._by_id.get(turn_id)

    def known_part(self, messages: list[Json]) -> tuple[list[Json], list[bytes]]:
        """The messages with those that an earlier turn had replaced by its own, and their hashes.

        A conversation of N turns is sent N times; so it is kept once, and hashed once.
        """
        for turn in self.turns[: -RECENT - 1 : -1]:
            shared = _shared(turn.messages, messages)
            if shared:
                known = turn.hashes[: shared + 1]
                return [*turn.messages[:shared], *messages[shared:]], chain_all(messages, known)
        return messages, chain_all(messages)

    def parents(
        self,
        messages: list[Json],
        hashes: list[bytes],
        context_key: str,
        traits: TemplateTraits | None = None,
    ) -> list[Candidate]:
        """The turns these messages go on from in this context, best first: those that cover most of them.

        Args:
            traits: of the chat template, which may read more of a message than its normal form holds.
        """
        for covered in range(len(messages) - 1, 0, -1):
            turns = reversed(self._by_tip.get(hashes[covered], ()))
            same = [t for t in turns if t.context_key == context_key]
            same = [t for t in same if _fits(t.conversation(), messages[:covered], traits)]
            # Twins (equal replies, other tokens) are distinguished by the call ids that clients echo.
            same = [t for t in same if _call_ids(t.reply) == _call_ids(messages[covered - 1])] or same
            if same:  # shallower ones lack what these said, so nothing could be appended to them
                return [Candidate(covered, t, len(same) > 1) for t in same]
        return []

    def base(self, messages: Sequence[Json], parent: TreeTurn | None) -> tuple[TreeTurn | None, int]:
        """The turn whose request to store this one against, and how many messages they share."""
        base = parent or (self.turns[-1] if self.turns else None)
        shared = 0 if base is None else _shared(base.messages, messages)
        return (base, shared) if shared else (None, 0)


def _age_order(turn: TreeTurn) -> str:
    return turn.turn_id  # ids sort by when they were made


def _shared(old: Sequence[Json], new: Sequence[Json]) -> int:
    """How many messages two lists begin with alike."""
    shared = 0
    for message, other in zip(old, new, strict=False):
        if message is not other and not exactly(message, other):
            break
        shared += 1
    return shared


def exactly(message: Any, other: Any) -> bool:
    """Whether two messages are the same JSON. To Python true, 1 and 1.0 are equal, so equality says too much
    of a message that holds more than text."""
    if message != other:
        return False
    if isinstance(other, dict):
        for value in other.values():
            if type(value) is not str and value is not None:
                break
        else:
            return True
    return orjson.dumps(message) == orjson.dumps(other)


def _fits(known: Sequence[Json], shown: Sequence[Json], traits: TemplateTraits | None) -> bool:
    """Whether messages of one normal form are the same to the template, and to what the model thought."""
    if traits is not None and (traits.counted or traits.developer):
        pairs = (
            (message, other) for message, other in zip(known, shown, strict=True) if message is not other
        )
        if not all(traits.same(in_form(message), in_form(other)) for message, other in pairs):
            return False
    return reasoning_fits(known, shown)


def _call_ids(message: Json) -> set[str]:
    ids = (call.get("id") for call in message.get("tool_calls") or () if isinstance(call, dict))
    return {call_id for call_id in ids if isinstance(call_id, str)}


def context_key(
    tools: Sequence[Json] | None, template_digest: str, tokenizer_digest: str, template_kwargs: Json
) -> str:
    """Digest of what shapes a prompt besides its messages; turns extend only within one context."""
    shaping: list[Any] = [list(tools or ()), template_digest, tokenizer_digest]
    return digest_json([*shaping, template_kwargs] if template_kwargs else shaping)


def plan_turn(
    tree: TurnTree,
    bridges: Bridges,
    messages: list[Json],
    tools: Sequence[Json] | None,
    key: str,
    template_kwargs: Json | None = None,
) -> Plan:
    """Decide the parent and the ids of a request.

    Raises:
        RequestError: 400, the chat template refuses the messages.
    """
    kwargs, tools = template_kwargs or {}, bridges.tools(key, tools)
    messages, hashes = tree.known_part(messages)
    tokenizer, traits = bridges.tokenizer, bridges.tokenizer.traits
    candidates = tree.parents(messages, hashes, key, traits) if bridges.refused is None else []
    refused: str | None = None
    for candidate in candidates:
        turn, covered = candidate.turn, candidate.covered
        new = messages[covered:]
        bridge = bridges.between(turn, messages[:covered], new, tools, kwargs, key)
        if isinstance(bridge, NoBridge):
            refused = refused or bridge.reason
            continue
        ids, missing = bridge.ids, left_out(bridge.text, new, traits, None, kwargs)
        hasher = turn.hasher.copy()
        hasher.update(ids_bytes(ids))
        base, shared = tree.base(messages, turn)
        whole = np.concatenate([*turn.whole(), ids])
        sent = (whole, ids, base, shared, messages, hashes, hasher)
        return Plan(turn, turn, None, *sent, candidate.twins, missing, bridge.text[-ENDING:])
    text = tokenizer.render(messages, tools, generate=True, **kwargs)
    ids, missing = tokenizer.encode(text), left_out(text, messages, traits, tools, kwargs)
    base, shared = tree.base(messages, None)
    unmatched = "no_matching_turn" if tree.turns else "first_turn"
    reason = (refused or unmatched) if bridges.refused is None else "extension_refused"
    echoed = candidates[0].turn if candidates else None
    sent = (ids, ids, base, shared, messages, hashes, hashlib.sha256(ids_bytes(ids)))
    return Plan(None, echoed, reason, *sent, left_out=missing, ending=text[-ENDING:])


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


SILENT = frozenset(
    (
        *("role", "content", "refusal", "tool_calls", "function_call", *REASONING, "token_ids"),
        *(
            "id",
            "index",
            "status",
            "tool_call_id",
            "annotations",
            "provider_specific_fields",
            "cache_control",
        ),
    )
)
"""Fields of a message that are looked for as texts, or that say nothing to a model."""
_OF_A_CALL = SILENT | {"type", "function"}
_OF_A_FUNCTION = SILENT | {"name", "arguments"}
"""Fields of a call and of its function that are looked for otherwise, or that say nothing to a model."""
_ARGUMENTS = 16
"""Of a call so many arguments are looked for."""
_PASSES = 64
"""So often a text is looked through in all; what was not looked for by then counts as left out."""


def left_out(
    rendered: str,
    messages: Sequence[Json],
    traits: TemplateTraits,
    tools: Sequence[Json] | None = None,
    template_kwargs: Json | None = None,
) -> tuple[str, ...]:
    """Names of what was sent and is not in the prompt, such as `messages.system.content`.

    Args:
        rendered: what the template made of the messages, and of the tools if they are given.
        messages: as sent.
    """
    search = _Search(rendered)
    names: set[str] = set()
    for tool in tools or ():
        if not search.has(str(tool["function"]["name"])):
            names.add("tools")
    for message in messages:
        form = in_form(message)
        role = str(form.get("role"))
        names |= {f"messages.{role}.{name}" for name in _unread(message, form, traits)}
        for name, text in _texts(form):
            field = f"messages.{role}.{name}"
            if field not in names and not search.has(text):
                names.add(field)
    return tuple(sorted(names | {_kwarg(k) for k in template_kwargs or () if k not in traits.variables}))


def _kwarg(name: str) -> str:
    return name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"


class _Search:
    """Looks for texts in a prompt: behind the last one first, as they mostly come in order."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._left = text, 0, _PASSES * (len(text) + 1)

    def has(self, text: str) -> bool:
        text = text.strip()
        if not text:
            return True
        # Some templates write a text as JSON: a tool's result, or the value of an argument.
        return self._find(text) or self._find(json.dumps(text, ensure_ascii=False)[1:-1])

    def _find(self, text: str) -> bool:
        for start, end in ((self._at, len(self._text)), (0, self._at + len(text))):
            if self._left < 0:
                return False
            at = self._text.find(text, start, end)
            self._left -= (end if at < 0 else at) - start
            if at >= 0:
                self._at = at + len(text)
                return True
        return False


def _texts(form: Json) -> Iterator[tuple[str, str]]:
    """(field, text) of all that a message says."""
    if form.get(REASONING[0]):
        yield REASONING[0], form[REASONING[0]]
    content = form["content"]
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] == "text":
            yield "content", part["text"]
    for call in form.get("tool_calls") or ():
        function = call["function"]
        yield "tool_calls", function["name"]
        for text in _arguments(function["arguments"]):
            yield "tool_calls", text
        for fields, known in ((call, _OF_A_CALL), (function, _OF_A_FUNCTION)):
            for name in fields.keys() - known:
                for text in _leaves(fields[name]):
                    yield f"tool_calls.{name}", text


def _arguments(arguments: str) -> list[str]:
    """Texts among a call's arguments, the first of them."""
    try:
        return _leaves(orjson.loads(arguments))
    except orjson.JSONDecodeError:
        return [arguments]


def _leaves(value: Any) -> list[str]:
    """Texts within a JSON value, the first of them."""
    waiting, texts = [value], list[str]()
    while waiting and len(texts) < _ARGUMENTS:
        value = waiting.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | list):
            waiting += reversed(list(value.values() if isinstance(value, dict) else value))
    return texts


def _unread(message: Json, form: Json, traits: TemplateTraits) -> set[str]:
    """Fields that say something, and that the template does not read."""
    place = place_of(str(form.get("role")))
    fields = {k for k, v in form.items() if k not in SILENT and v not in EMPTY}
    return {k for k in fields if not traits.reads(place, k)} | unread_in_parts(message.get("content"))
