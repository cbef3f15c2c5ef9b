"""A row that notes which of its keys were read, and the lines of chats that are made of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.ingest.datasets.messages import RowError, is_dialogue, messages_of, read_json, tools_of
from rollbook.store.events import Json
from rollbook.store.interchange.chats import shown

CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
"""Keys of whole conversations."""
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
    "input": ("output",),
}
"""Key of a prompt -> keys of its answer."""
MORE_OF_A_PROMPT = ("input", "context")
"""Keys of a text that an instruction or a question is about."""
SYSTEMS = ("system", "system_prompt")


@dataclass(slots=True)
class Row:
    """A row; `mark` tells it from all others, and `read` has those of its keys that were read."""

    values: Json
    mark: str
    read: set[str] = field(default_factory=set)

    def has(self, *keys: str) -> bool:
        """Whether it has any of the keys."""
        return any(self.values.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str | None:
        """The first of the keys that it has."""
        return next((key for key in keys if self.has(key)), None)

    def take(self, key: str) -> Any:
        """The value of a key, which is read by that; None if it has none."""
        self.read.add(key)
        return self.values.get(key)

    def number(self, key: str) -> float | None:
        """The number of a key, if it has one.

        Raises:
            RowError: it is no finite number.
        """
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RowError(f"{key} is {value!r}: write a finite number, or leave it out")
        return float(value)


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The chats of a row, as lines that `rollbook import` reads.

    Attributes:
        names: of the trajectories.
        margin: of the preference, where there are two: the first is the chosen one.
        shape: which one the row has.
    """

    lines: tuple[Json, ...]
    names: tuple[str, ...]
    margin: float | None = None
    shape: str = ""


def line_of(row: Row, messages: list[Json], context: int, name: str) -> Json:
    """The line of a chat; keys of the row that were not read go on as they are.

    Args:
        context: how many of the messages come before the first reply that counts.
    """
    tools, kwargs = tools_of(row.values), row.values.get("chat_template_kwargs")
    rest = {key: value for key, value in row.values.items() if key not in row.read | {"tools", "functions"}}
    if isinstance(kwargs, str):
        rest["chat_template_kwargs"] = read_json("chat_template_kwargs", kwargs)
    if isinstance(rest.get("context"), str):
        raise RowError(f"context is {shown(rest['context'])}: write it into the prompt, or leave it out")
    line = rest | ({"tools": tools} if tools else {}) | {"messages": messages, "trajectory": name}
    return line | ({"context": context} if context else {})


def question_and_answer(row: Row) -> tuple[str, str] | None:
    """The keys of a prompt and of its answer; None where the row has no such two.

    Raises:
        RowError: it has several.
    """
    pairs = [
        (prompt, answer)
        for prompt, answers in ANSWERS.items()
        if row.has(prompt)
        for answer in answers
        if row.has(answer)
    ]
    if any(prompt == "instruction" for prompt, _ in pairs):
        pairs = [(prompt, answer) for prompt, answer in pairs if prompt != "input"]
    if len(pairs) > 1:
        choices = " or ".join(f"{prompt} and {answer}" for prompt, answer in pairs)
        raise RowError(f"it has {choices}: say which by --key, such as --key completion={pairs[0][1]}")
    return pairs[0] if pairs else None


def prompt_of(row: Row, key: str) -> list[Json]:
    """The messages of a prompt: the row's system message, and what a key holds.

    An instruction or a question has behind it, after an empty line, the text that it is about.
    """
    value = row.take(key)
    about = row.first(*(name for name in MORE_OF_A_PROMPT if name != key))
    if key not in CHATS and about is not None and isinstance(value, str):
        more = row.values[about]
        if isinstance(more, str):
            row.read.add(about)
            value = f"{value}\n\n{more}" if more.strip() else value
    return with_system(row, messages_of(key, value, "user"))


def answer_of(row: Row, key: str, prompt_key: str | None) -> list[Json]:
    """The messages of an answer; behind a dialogue, without the space that parts it from `Assistant:`."""
    value = row.take(key)
    if isinstance(value, str) and is_dialogue(row.values.get(prompt_key or "")):
        value = value.strip()
    return messages_of(key, value, "assistant")


def with_system(row: Row, messages: list[Json]) -> list[Json]:
    """The messages behind the system message that the row has beside them.

    Raises:
        RowError: they have another one.
    """
    key = row.first(*SYSTEMS)
    if key is None:
        return messages
    system = row.take(key)
    if not isinstance(system, str):
        raise RowError(f"{key} is {shown(system)}: write a text")
    there = [message for message in messages if message["role"] in ("system", "developer")]
    if not system.strip() or (there and there[0].get("content") == system):
        return messages
    if there:
        raise RowError(f"{key} and a message of role {there[0]['role']} say two different things: keep one")
    return [{"role": "system", "content": system}, *messages]


def same(some: list[Json], others: list[Json]) -> bool:
    """Whether messages say the same, but for space around it."""
    return len(some) == len(others) and all(_plain(a) == _plain(b) for a, b in zip(some, others, strict=True))


def _plain(message: Json) -> tuple[Any, Any]:
    content = message.get("content")
    return message["role"], content.strip() if isinstance(content, str) else content


def other_prompt(key: str, messages: list[Json]) -> str:
    """What is wrong with an answer that begins with a prompt of its own."""
    return (
        f"{key} begins with {shown(messages[0])}, and not with the prompt beside it: leave the prompt "
        "out, or write the answers alone"
    )
