"""What a request asks of an upstream and what the upstream replies, whichever API they speak. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json

MOST_CHOICES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompts:
    """The prompts of a request.

    Attributes:
        prompts: the messages of each prompt; one for a conversation.
        each: completions of each prompt.
        certain: whether it is known which choice answers which prompt, and that it holds nothing else.
    """

    prompts: list[list[Json]]
    each: int = 1
    certain: bool = True

    @property
    def choices(self) -> int:
        """How many completions the reply is to hold."""
        return min(len(self.prompts) * self.each, MOST_CHOICES)

    def of(self, choice: int) -> int | None:
        """The prompt that a choice answers; None of a choice that was not asked for, and could be any's."""
        if len(self.prompts) == 1:
            return 0
        return choice // self.each if choice < self.choices else None


def one_conversation(call: ModelCall) -> AskedPrompts:
    """A request for `n` replies to one conversation."""
    counted, each = asked_count(call)
    # With echo a choice holds its prompt too, and nobody says where that ends.
    return AskedPrompts([call.messages], each, counted and not call.rest.get("echo"))


def asked_count(call: ModelCall) -> tuple[bool, int]:
    """(whether `n` is a count, or left out; how many completions it asks for)"""
    n = call.rest.get("n")
    counted = n is None or (type(n) is int and n >= 1)
    return counted, n if counted and n is not None else 1


@dataclass(frozen=True, slots=True)
class UpstreamChoice:
    """One completion of a reply.

    Attributes:
        message: in chat form.
        finish_reason: OpenAI's; null where the reply ended early.
        index: its place among those of the reply.
        ids: sampled token ids, or None.
        logprobs: one for each of them, or None.
        extra: the other fields of the choice, as the upstream sent them.
        prompt_ids: what the upstream sends beside the choice as the ids of its prompt, unchecked, or None.
    """

    message: Json
    finish_reason: str | None
    index: int = 0
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Json = field(default_factory=dict)
    prompt_ids: Any = None

    def without_tokens(self) -> UpstreamChoice:
        """The text alone: tokens spell what was taken out of it."""
        extra = {k: v for k, v in self.extra.items() if k != "logprobs"}
        return replace(self, ids=None, logprobs=None, extra=extra, prompt_ids=None)


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """A whole reply: its choices, and the rest as it came.

    Attributes:
        prompt_ids: what the upstream sends once for all choices as the ids of the prompt, or None.
        error: what the upstream says went wrong, perhaps after a part of the reply.
        placed: whether every choice has an index of its own; else they are counted in order.
    """

    choices: tuple[UpstreamChoice, ...]
    prompt_ids: Any
    rest: Json
    error: Any = None
    placed: bool = True

    def without_tokens(self) -> UpstreamReply:
        """The text alone."""
        return replace(self, choices=tuple(c.without_tokens() for c in self.choices), prompt_ids=None)


NO_REPLY = UpstreamReply((), None, {})
"""A reply in which no completion can be read."""


def are_ids(ids: Any) -> bool:
    """Whether these are token ids, as they can be stored."""
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)


def without_nulls(body: Json, *names: str) -> Json:
    """The fields of a body but for those named; null is nothing."""
    return {k: v for k, v in body.items() if k not in names and v is not None}
