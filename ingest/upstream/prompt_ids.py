"""Which prompt each completion of a reply answers, and with which ids, where that is certain. Pure.

A request for completions may hold several prompts, n completions of each: choice i answers prompt i // n.
An upstream tells the ids of prompts beside each choice, or once for the whole reply. Ids that are taken for
another prompt's would be a wrong sample that looks exact; so what cannot be true is not believed at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.ingest.endpoints.upstream_reply import AskedPrompts, UpstreamReply, are_ids
from rollbook.store.events import Json


def prompt_ids(asked: AskedPrompts, reply: UpstreamReply) -> dict[int, list[int]]:
    """Choice -> the ids of its prompt. Choices whose ids are missing or implausible are left out."""
    several = len(asked.prompts) > 1
    if not asked.certain or (several and not reply.placed):
        return {}
    given: dict[int, list[Any]] = {}
    for choice in reply.choices:
        prompt = asked.of(choice.index)
        if choice.prompt_ids is not None and prompt is not None:
            given.setdefault(prompt, []).append(choice.prompt_ids)
    if reply.prompt_ids is not None and not several:
        given.setdefault(0, []).append(reply.prompt_ids)
    agreed = {prompt: ids[0] for prompt, ids in given.items() if _agree(ids)}
    agreed = {p: ids for p, ids in agreed.items() if _can_be(asked.prompts[p], ids)}
    agreed = {p: agreed[p] for p in agreed if _alone(p, agreed, given, asked.prompts)}
    of_choices = [(choice.index, asked.of(choice.index)) for choice in reply.choices]
    return {choice: agreed[prompt] for choice, prompt in of_choices if prompt in agreed}


def _agree(given: Sequence[Any]) -> bool:
    """Whether all ids given for one prompt are equal, and valid."""
    return bool(given[0]) and are_ids(given[0]) and all(ids == given[0] for ids in given)


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
    given: Mapping[int, list[Any]],
    prompts: Sequence[list[Json]],
) -> bool:
    """Whether no other prompt contradicts its ids: other prompts have other ids, and equal ones the same."""
    content = prompts[prompt][0].get("content") if len(prompts) > 1 else None
    for other, ids in given.items():
        if other != prompt and (prompts[other][0].get("content") == content) != (ids[0] == agreed[prompt]):
            return False
    return True
