"""Which prompt each completion of a reply answers, and with which ids, where that is certain. Pure.

A request for completions may hold several prompts, n completions of each: choice i answers prompt i // n.
An upstream tells the ids of prompts beside each choice, or once for the whole reply. Ids that are taken for
another prompt's would be a wrong sample that looks exact; so what cannot be true is not believed at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.upstream.reply import UpstreamReply, are_ids
from rollbook.store.events import Json

MOST_CHOICES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompts:
    """What a request asks completions of.

    Attributes:
        prompts: the messages of each prompt; one for a conversation.
        each: completions of each prompt.
        certain: whether it can be told which choice answers which prompt, and holds nothing else.
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


def asked_prompts(call: ModelCall) -> AskedPrompts:
    """The prompts of a request, and how often each is to be completed."""
    n = call.rest.get("n")
    counted = n is None or (type(n) is int and n >= 1)
    each = n if counted and n is not None else 1
    # With echo a choice holds its prompt too, and nobody says where that ends.
    certain = counted and not call.rest.get("echo")
    raw = _several(call.messages)
    if not raw:
        return AskedPrompts([call.messages], each, certain)
    if not counted or len(raw) * each > MOST_CHOICES or len({type(one) for one in raw}) > 1:
        return AskedPrompts([call.messages], len(raw) * each, certain=False)
    return AskedPrompts([[{"role": "prompt", "content": one}] for one in raw], each, certain)


def _several(messages: Sequence[Json]) -> list[Any]:
    """The prompts, where there are several; ids are numbers, and together one."""
    prompt = messages[0].get("content") if messages and messages[0].get("role") == "prompt" else None
    several = isinstance(prompt, list) and len(prompt) > 1 and any(isinstance(p, str | list) for p in prompt)
    return prompt if several and isinstance(prompt, list) else []


def prompt_ids(asked: AskedPrompts, reply: UpstreamReply) -> dict[int, list[int]]:
    """Choice -> the ids of its prompt. A choice is not in it where they are not told, or cannot be true."""
    several = len(asked.prompts) > 1
    if not asked.certain or (several and not reply.placed):
        return {}
    told: dict[int, list[Any]] = {}
    for choice in reply.choices:
        prompt = asked.of(choice.index)
        if choice.prompt_ids is not None and prompt is not None:
            told.setdefault(prompt, []).append(choice.prompt_ids)
    if reply.prompt_ids is not None and not several:
        told.setdefault(0, []).append(reply.prompt_ids)
    agreed = {prompt: ids[0] for prompt, ids in told.items() if _agree(ids)}
    agreed = {p: ids for p, ids in agreed.items() if _can_be(asked.prompts[p], ids)}
    agreed = {p: agreed[p] for p in agreed if _alone(p, agreed, told, asked.prompts)}
    of_choices = [(choice.index, asked.of(choice.index)) for choice in reply.choices]
    return {choice: agreed[prompt] for choice, prompt in of_choices if prompt in agreed}


def _agree(told: Sequence[Any]) -> bool:
    """Whether all that is told of one prompt is the same, and ids."""
    return bool(told[0]) and are_ids(told[0]) and all(ids == told[0] for ids in told)


def _can_be(messages: Sequence[Json], ids: list[int]) -> bool:
    """Whether ids are those of a prompt that was sent as ids: an upstream may put one in front, or cut."""
    sent = messages[0].get("content") if messages and messages[0].get("role") == "prompt" else None
    if not are_ids(sent):
        return True
    assert isinstance(sent, list)
    longer, shorter = (sent, ids) if len(sent) > len(ids) else (ids, sent)
    return longer[len(longer) - len(shorter) :] == shorter


def _alone(
    prompt: int,
    agreed: Mapping[int, list[int]],
    told: Mapping[int, list[Any]],
    prompts: Sequence[list[Json]],
) -> bool:
    """Whether no other prompt contradicts its ids: other prompts have other ids, and equal ones the same."""
    content = prompts[prompt][0].get("content") if len(prompts) > 1 else None
    for other, ids in told.items():
        if other != prompt and (prompts[other][0].get("content") == content) != (ids[0] == agreed[prompt]):
            return False
    return True
