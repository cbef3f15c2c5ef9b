"""The bridge: the ids to append to a parent turn so that new messages follow it. Pure.

It is derived from the chat template: render the parent's request with an assistant message that holds
a sentinel, once alone and once followed by the new messages; what follows the sentinel's end-of-turn
token is the text to append. A bridge only appends. On any doubt it is refused with a reason, and the
request becomes a new root: one more sample, never a wrong token.

Of a long conversation only the part that decides is rendered. Chat templates look at the system messages, at
the last thing the user said, and at the end; what a bridge appends rarely depends on
anything between. Whether that holds for a template is tried, not assumed: see `Bridges`.

A trial asks a template for the same many times, so what was rendered is remembered.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import jinja2
import numpy as np
from cachetools import LRUCache

from rollbook.ingest.tokens.chat_template import ChatTokenizer, WrittenTool
from rollbook.ingest.tokens.message_form import reasoning_of, reasoning_removed
from rollbook.ingest.tokens.template_traits import CALL, TemplateTraits
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TokenIds

SENTINEL = f"sentinel-{secrets.token_hex(8)}"
"""Random per process: text that happens to hold it makes a root, which is safe."""
THOUGHT = f"thought-{secrets.token_hex(8)}"
"""Stands for a reply's reasoning, likewise."""


CONTEXTS, RENDERINGS = 64, 256
"""How many contexts' tools are kept, and how many renderings."""
_Renderings = LRUCache[tuple[Any, ...], str]
"""Of a parent's excerpt and the stand-in of its reply, which are mostly the same while tools are used."""


@dataclass(frozen=True, slots=True)
class NoBridge:
    """Why no ids could be derived; the request becomes a root with this reason."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """What follows a parent's completion: the text of the new messages, and its ids."""

    text: str
    ids: TokenIds


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """What a run decides about doubtful cases; recorded with the run.

    Attributes:
        reasoning: `restore`: a client that drops a reply's reasoning means nothing by it, and the model
            goes on from what it sampled. `respect`: it is a removal, and makes a root.
        history: `faithful`: where the template would render earlier turns otherwise than they were sampled
            (Qwen3 strips reasoning once the user speaks again, DeepSeek-R1's distillates always), a root.
            `preserve`: go on from what was sampled, and append.
        unfinished: `root`: a parent without an end-of-turn token (cut off, or stopped by a string) is not
            extended. `close`: the token is appended, as context that is not trained.
    """

    reasoning: str = "restore"
    history: str = "faithful"
    unfinished: str = "root"


class Parent(Protocol):
    """What a bridge needs of the turn it starts from."""

    @property
    def ids(self) -> TokenIds: ...
    @property
    def cut(self) -> bool: ...

    def conversation(self) -> list[Json]:
        """Its messages and its reply, with all reasoning that was sampled."""


@dataclass(slots=True, eq=False)
class Bridges:
    """Bridges of one tokenizer and template under one policy.

    Rendering a whole conversation twice for each turn takes time that grows with it. Where the trial shows
    that a bridge does not depend on what came long before, an excerpt is rendered instead; and it is
    compared with the whole again each time a conversation has doubled.

    Attributes:
        refused: why turns are never extended, or None.
        by_excerpt: whether excerpts serve with this template.
    """

    tokenizer: ChatTokenizer
    policy: TreePolicy = field(default_factory=TreePolicy)
    refused: str | None = None
    by_excerpt: bool = False
    _tools: LRUCache[str, list[Json]] = field(default_factory=lambda: LRUCache(CONTEXTS))
    _alone: _Renderings = field(default_factory=lambda: LRUCache(RENDERINGS))

    def tools(self, key: str, tools: Sequence[Json] | None) -> Sequence[Json] | None:
        """The tools of a context, written once for all its requests.

        Args:
            key: the context's, of which the tools are a part.
        """
        if tools and key not in self._tools:
            self._tools[key] = [WrittenTool(tool) for tool in tools]
        return self._tools[key] if tools else None

    @classmethod
    def tested(cls, tokenizer: ChatTokenizer, policy: TreePolicy | None = None) -> Bridges:
        """Bridges after the self-test and the trial."""
        # Both ask for the same conversations, for each end of a turn.
        trial = replace(tokenizer, template=cast(jinja2.Template, _Remembering(tokenizer.template)))
        bridges = cls(trial, policy or TreePolicy(), self_test(trial))
        bridges.by_excerpt = bridges.refused is None and bridges._excerpts_agree()
        bridges.tokenizer = tokenizer
        return bridges

    def between(
        self,
        parent: Parent,
        shown: Sequence[Json],
        new: Sequence[Json],
        tools: Sequence[Json] | None,
        kwargs: Json,
        key: str = "",
    ) -> Appended | NoBridge:
        """What leads from a turn to a request's new messages, or why there are none.

        Args:
            shown: the turn's messages and its reply as the client shows them.
            key: of the context that tools and kwargs are part of; empty: unknown.
        """
        # Rendered with the reasoning that its ids hold: a template may take that away at the new messages.
        *messages, reply = conversation = parent.conversation()
        if self.policy.reasoning == "respect" and reasoning_removed(conversation, shown):
            return NoBridge("reasoning_removed")
        last = int(parent.ids[-1])
        if parent.cut and last in self.tokenizer.stop_ids:
            return NoBridge("reply_was_cut")
        count = len(messages)
        if not self.by_excerpt:
            return self._derive(messages, reply, new, tools, kwargs, last)
        short = excerpt(messages, new)
        short_bridge = self._derive(short, bare(reply, self.tokenizer.traits), new, tools, kwargs, last, key)
        if not _is_due(count):
            return short_bridge
        whole = self._derive(messages, reply, new, tools, kwargs, last)
        self.by_excerpt = _same(short_bridge, whole)
        return whole

    def _derive(
        self,
        messages: Sequence[Json],
        reply: Json,
        new: Sequence[Json],
        tools: Sequence[Json] | None,
        kwargs: Json,
        last: int,
        key: str = "",
    ) -> Appended | NoBridge:
        known = (self._alone, key) if key else None
        return appended(self.tokenizer, messages, reply, new, tools, last, kwargs, self.policy, known)

    def _excerpts_agree(self) -> bool:
        for messages, reply, new, tools in trial_conversations():
            for last in self.tokenizer.stop_ids:
                whole = self._derive(messages, reply, new, tools, {}, last)
                short = self._derive(
                    excerpt(messages, new), bare(reply, self.tokenizer.traits), new, tools, {}, last
                )
                if not _same(whole, short):
                    return False
        return True


def _is_due(count: int) -> bool:
    """Whether a conversation has just passed a power of two of messages (each turn adds about two)."""
    return count > 16 and (count & (count - 1) == 0 or (count - 1) & (count - 2) == 0)


def _same(left: Appended | NoBridge, right: Appended | NoBridge) -> bool:
    if isinstance(left, NoBridge) or isinstance(right, NoBridge):
        return isinstance(left, NoBridge) and isinstance(right, NoBridge) and left == right
    return np.array_equal(left.ids, right.ids)


def bridge(
    tokenizer: ChatTokenizer,
    parent_messages: Sequence[Json],
    reply: Json,
    new_messages: Sequence[Json],
    tools: Sequence[Json] | None,
    last_id: int,
    template_kwargs: Json | None = None,
    policy: TreePolicy | None = None,
) -> TokenIds | NoBridge:
    """Ids that follow the parent's completion, or why there are none.

    Args:
        parent_messages: the parent's request, as received.
        reply: the parent's reply, as sent.
        new_messages: what the client added behind it.
        last_id: last id of the parent's completion.
    """
    args = (tokenizer, parent_messages, reply, new_messages, tools, last_id, template_kwargs or {})
    result = appended(*args, policy or TreePolicy())
    return result if isinstance(result, NoBridge) else result.ids


def appended(
    tokenizer: ChatTokenizer,
    parent_messages: Sequence[Json],
    reply: Json,
    new_messages: Sequence[Json],
    tools: Sequence[Json] | None,
    last_id: int,
    kwargs: Json,
    policy: TreePolicy,
    known: tuple[_Renderings, str] | None = None,
) -> Appended | NoBridge:
    """As `bridge`, with the text that the ids are of.

    Args:
        known: renderings that were made before, and the key of this one's context.
    """
    if any(m.get("role") == "assistant" for m in new_messages):
        return NoBridge("foreign_assistant_message")
    finished = last_id in tokenizer.stop_ids
    if not finished and policy.unfinished != "close":
        return NoBridge("parent_without_end_of_turn")
    faithful = policy.history == "faithful"
    stand_in = _stand_in(reply, tokenizer, thinks=faithful)
    try:
        alone = _rendered_alone(tokenizer, [*parent_messages, stand_in], tools, kwargs, known)
        full = tokenizer.render([*parent_messages, stand_in, *new_messages], tools, generate=True, **kwargs)
        if alone.count(SENTINEL) != 1 or full.count(SENTINEL) != 1:
            return NoBridge("sentinel_not_rendered_once")
        if faithful and not _kept(alone, full, thought=THOUGHT in str(stand_in)):
            # The lone turn may be what reads otherwise: Qwen3 shows an empty thought in the last turn only.
            prompt = tokenizer.render(parent_messages, tools, generate=True, **kwargs)
            if not _goes_on(prompt, full, thought=THOUGHT in str(stand_in)):
                return NoBridge("template_rewrites_history")
    except RequestError:
        return NoBridge("template_refuses")
    end = last_id if finished else tokenizer.stop_ids[0]
    after = _after_turn(alone, full, tokenizer.text_of(end))
    if isinstance(after, NoBridge):
        return after
    ids = tokenizer.encode(after)
    return Appended(after, ids if finished else np.concatenate([np.asarray([end], np.int32), ids]))


def _rendered_alone(
    tokenizer: ChatTokenizer,
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    kwargs: Json,
    known: tuple[_Renderings, str] | None,
) -> str:
    """The rendering of a parent and its stand-in, which is remembered.

    Raises:
        RequestError: 400, the template refuses the messages.
    """
    if known is None:
        return tokenizer.render(messages, tools, generate=False, **kwargs)
    renderings, context = known
    key = (context, *(part for message in messages for part in _spelled(message)))
    rendering = renderings.get(key)
    if rendering is None:
        rendering = renderings[key] = tokenizer.render(messages, tools, generate=False, **kwargs)
    return rendering


def _spelled(message: Json) -> tuple[str, str, str]:
    """A message as texts that tell it from all others."""
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str:
        return "", "", repr(message)
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return role, content, repr(rest) if rest else ""


def bare(reply: Json, traits: TemplateTraits) -> Json:
    """The reply with calls that have no arguments, and no ids if the template reads none: what follows them
    does not hang on what they were given."""
    calls = reply.get("tool_calls")
    return reply | {"tool_calls": [_bare_call(call, traits) for call in calls]} if calls else reply


def _bare_call(call: Json, traits: TemplateTraits) -> Json:
    call = call | {"function": call["function"] | {"arguments": "{}"}}
    return call if traits.reads(CALL, "id") else call | {"id": ""}


def _stand_in(reply: Json, tokenizer: ChatTokenizer, *, thinks: bool) -> Json:
    """A message of the shape of a reply, with the sentinel for its content.

    Args:
        thinks: with its reasoning, under the name that the template reads; where it reads none, in front of
            the content, as it was sampled: a template may take it away from there, too.
    """
    traits, calls = tokenizer.traits, reply.get("tool_calls")
    stand_in: Json = {"role": "assistant", "content": SENTINEL}
    if calls:
        stand_in["tool_calls"] = calls
    if not thinks or not reasoning_of(reply):
        return stand_in
    if traits.reasoning is None:
        return stand_in | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{SENTINEL}"}
    if calls and not traits.thinks_beside_calls and not reply.get("content"):
        return stand_in | {"content": "", "reasoning_content": SENTINEL}  # the only place for either
    return stand_in | {"reasoning_content": THOUGHT}


def _kept(alone: str, full: str, *, thought: bool) -> bool:
    """Whether what comes in front of a reply's content stays as it was, its reasoning with it."""
    head = full.split(SENTINEL)[0]
    return alone.split(SENTINEL)[0] == head and (not thought or THOUGHT in head)


def _goes_on(prompt: str, full: str, *, thought: bool) -> bool:
    """Whether in front of a reply's content there is the prompt as it was sent, and then its reasoning."""
    head = full.split(SENTINEL)[0]
    between = head[len(prompt) :]
    return head.startswith(prompt) and (THOUGHT in between if thought else not between)


def _after_turn(alone: str, full: str, end: str) -> str | NoBridge:
    """The text behind the stand-in's end-of-turn token, from its two renderings."""
    turn, rest = alone.split(SENTINEL)[1], full.split(SENTINEL)[1]
    # Some turns (GLM's) end with the token that opens the next, which the model samples.
    own = turn + end
    if turn.rstrip().endswith(end) or not rest.startswith(own):
        own = turn[: turn.rfind(end) + len(end)] if end in turn else turn
        if not rest.startswith(own):
            return NoBridge("template_changes_the_turn")
        if not end or end not in turn:
            return NoBridge("no_end_of_turn_in_template")
    return rest[len(own) :]


def self_test(tokenizer: ChatTokenizer) -> str | None:
    """Why this tokenizer and template may not extend turns, or None if they may.

    Checks that the end-of-turn token is atomic (ids of text around it are the ids of the two sides),
    and that a derived bridge equals what rendering the whole conversation gives.
    """
    end = tokenizer.text_of(tokenizer.stop_ids[0])
    for left, right in (("a b", "\nc"), ("x\n", "\n\ny"), ("1", "2"), ("é ", " ü"), ("{", "}")):
        whole = tokenizer.encode(left + end + right).tolist()
        parts = [*tokenizer.encode(left), tokenizer.stop_ids[0], *tokenizer.encode(right)]
        if whole != parts:
            return "end_of_turn_not_atomic"
    for messages, reply, new, tools in trial_conversations():
        if not all(
            _bridge_is_rendering(tokenizer, messages, reply, new, tools, last) for last in tokenizer.stop_ids
        ):
            return "bridge_differs_from_rendering"
    return None


def _bridge_is_rendering(
    tokenizer: ChatTokenizer,
    messages: Sequence[Json],
    reply: Json,
    new: Sequence[Json],
    tools: Sequence[Json] | None,
    last_id: int,
) -> bool:
    """Whether rendering everything ends with the last id and the bridge; true where there is no bridge."""
    bridge_ids = bridge(tokenizer, messages, reply, new, tools, last_id)
    if isinstance(bridge_ids, NoBridge):
        return True  # such turns become roots one by one, each with its reason
    try:
        rendered = tokenizer.render([*messages, reply, *new], tools, generate=True)
    except RequestError:
        return True
    end = np.asarray([last_id, *bridge_ids], np.int32)
    return np.array_equal(tokenizer.encode(rendered)[-len(end) :], end)


def excerpt(messages: Sequence[Json], new: Sequence[Json]) -> list[Json]:
    """Leading system messages and the last user message, behind which the reply and the new messages come.

    If the user speaks again among the new messages it is all from the user message before the last on: many
    templates rewrite that then. Conversations without a user message are given back whole.
    """
    lead = 0
    while lead < len(messages) and messages[lead].get("role") in ("system", "developer"):
        lead += 1
    spoken = [i for i in range(lead, len(messages)) if messages[i].get("role") == "user"]
    if not spoken:
        return list(messages)
    if any(m.get("role") not in ("tool", "function") for m in new):
        return [*messages[:lead], *messages[spoken[-2:][0] :]]
    return [*messages[:lead], messages[spoken[-1]]]


Trial = tuple[list[Json], Json, list[Json], list[Json] | None]
"""(request, reply, new messages, tools)"""

_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


def _call(number: int) -> Json:
    function = {"name": "look", "arguments": f'{{"what": "thing {number}"}}'}
    # Nine letters and digits: what the strictest of templates asks of an id.
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _used_tool(number: int, calls: int = 1) -> list[Json]:
    tool_calls = [_call(number * 10 + i) for i in range(calls)]
    thought = {"reasoning_content": f"thought {number}"} if number % 4 == 1 else {}
    message = {"role": "assistant", "content": f"Looking {number}.", "tool_calls": tool_calls} | thought
    return [
        message,
        *({"role": "tool", "tool_call_id": c["id"], "content": f"found {c['id']}"} for c in tool_calls),
    ]


def _exchange(number: int) -> list[Json]:
    thought = {"reasoning_content": f"thought {number}"} if number % 2 else {}
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": f"answer {number}"} | thought,
    ]


def trial_conversations() -> Iterator[Trial]:
    """Conversations of every shape that agents have: short and long, with tools and without."""
    system: Json = {"role": "system", "content": "Be brief."}
    user: Json = {"role": "user", "content": "one"}
    more: Json = {"role": "user", "content": "two"}
    answer: Json = {"role": "assistant", "content": "done"}
    for lead in ([], [system]):
        yield [*lead, user], answer, [more], None
        chat = [message for n in range(8) for message in _exchange(n)]
        yield [*lead, *chat, user], answer, [more], None
        # Tools were used, but only for what was asked long ago.
        used = [
            m
            for n in range(4)
            for m in [*_exchange(n)[:1], *_used_tool(50 + n, 1 + n % 2), *_exchange(n)[1:]]
        ]
        chat = [*used, *chat[8:]]
        for steps in (0, 9):
            used = [message for n in range(steps) for message in _used_tool(n, 1 + n % 2)]
            call, *results = _used_tool(90, 2)
            yield [*lead, user, *used], call, results, _TOOLS
            yield [*lead, user, *used], answer, [more], _TOOLS
            yield [*lead, *chat, user, *used], call, results, _TOOLS
            yield [*lead, *chat, user, *used], call, [*results, more], _TOOLS


class _Remembering:
    """What `ChatTokenizer` asks of a template. A conversation that is refused is asked for again."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template
        self._rendered: dict[str, str] = {}

    def render(self, **given: Any) -> str:
        """The template's text of what is given, which is texts, numbers, lists and dicts."""
        key = repr(given)
        if key not in self._rendered:
            self._rendered[key] = self._template.render(**given)
        return self._rendered[key]
