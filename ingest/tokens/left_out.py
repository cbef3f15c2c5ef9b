"""What a chat template leaves out of a request, so that the client learns of it. Pure.

Templates drop things by rules of their own: system messages that are not the first, results without a call,
calls beyond the first, reasoning of earlier turns, tools. Nothing says so but the text they make; so that is
looked through for every text that was sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from rollbook.ingest.tokens.message_form import EMPTY, REASONING, in_form, unread_in_parts
from rollbook.ingest.tokens.template_traits import TemplateTraits, place_of
from rollbook.store.events import Json

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
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        return any(self._find(form) for form in dict.fromkeys((text, escaped)))

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
