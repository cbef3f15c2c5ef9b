"""Rows of data sets, in the shapes in which people have them, as chats. Pure.

`SHAPES` lists them. A row is of the first whose keys it has, unless one is asked for by name. What a key may
hold is in `messages`. Keys that mean nothing here become labels.

Rows of two answers to a prompt, of which one is better, are two chats and a preference.

A row that notes which of its keys were read, and the lines of chats that are made of it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.ingest.datasets.messages import RowError, is_dialogue, messages_of, read_json, tools_of
from rollbook.store.digest import digest_json
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


KEYS, OF_OPENAI = ("chosen", "rejected"), ("preferred_output", "non_preferred_output")
SCORES = ("score_chosen", "score_rejected")
SAME_PROMPT = 40
"""Characters of a prompt from which on two answers that begin with it do not do so by chance."""


def is_pair(row: Row) -> bool:
    """Whether a row has the keys of a pair."""
    return row.has(*KEYS) or row.has(*OF_OPENAI)


def pair(row: Row) -> Converted:
    """The chosen chat, and the rejected one, in a group.

    Raises:
        RowError: they cannot be told.
    """
    keys = KEYS if row.has(*KEYS) else OF_OPENAI
    if not all(row.has(key) for key in keys):
        raise RowError(f"it has {keys[0]} or {keys[1]} alone: write both")
    if keys == OF_OPENAI:
        _spread_input(row)
    context, answers = _apart(row, keys)
    if answers[0] == answers[1]:
        raise RowError(f"{keys[0]} and {keys[1]} are the same: leave the row out")
    margin = row.number("margin")
    scores = [row.number(key) for key in SCORES]
    row.read.add("label")
    lines, names = [], []
    for kind, key, answer, score in zip(KEYS, keys, answers, scores, strict=True):
        if not answer:
            raise RowError(f"{key} is only the beginning of the other: write an answer in both")
        messages = with_system(row, [*context, *answer])
        names.append(f"pair-{row.mark}-{kind}")
        line = line_of(row, messages, len(messages) - len(answer), names[-1])
        lines.append(line | {"group": f"pair-{row.mark}"} | ({} if score is None else {"reward": score}))
    return Converted(tuple(lines), tuple(names), margin)


def _apart(row: Row, keys: tuple[str, str]) -> tuple[list[Json], list[list[Json]]]:
    """The prompt that both answers share, and the two answers.

    Answers that begin with the assistant answer the row's prompt. Others are whole conversations: their
    common beginning is the prompt, and it must contain the row's own prompt, if it has one.
    """
    prompt_key = row.first(*ANSWERS)
    texts = [row.values[key] for key in keys]
    if prompt_key is None and not row.has(*CHATS) and any(_is_plain(text) for text in texts):
        raise RowError(
            f"{keys[0]} and {keys[1]} are texts without a prompt: write prompt, or lists of messages"
        )
    _refuse_repeated(row.values.get(prompt_key or ""), *texts)
    answers = [answer_of(row, key, prompt_key) for key in keys]
    answers_alone = [messages[0]["role"] == "assistant" for messages in answers]
    if all(answers_alone):
        key = prompt_key or row.first(*CHATS)
        if key is None:
            raise RowError(f"{keys[0]} and {keys[1]} are answers without a prompt: write prompt")
        return prompt_of(row, key), answers
    if any(answers_alone):
        raise RowError(
            f"of {keys[0]} and {keys[1]} one begins with an answer, the other does not: write both alike"
        )
    shared = next(
        (i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), min(map(len, answers))
    )
    begins = answers[0][:shared]
    if prompt_key is not None and not _holds(begins, prompt_of(row, prompt_key)):
        raise RowError(other_prompt(keys[0], answers[0]))
    return begins, [messages[shared:] for messages in answers]


def _is_plain(value: object) -> bool:
    """Whether a value is a text that is one message, and no whole conversation."""
    return isinstance(value, str) and not is_dialogue(value) and not value.lstrip().startswith("[")


def _refuse_repeated(prompt: object, *texts: object) -> None:
    """Refuse two texts of which each has the whole prompt in front again."""
    if not isinstance(prompt, str) or len(prompt) < SAME_PROMPT or is_dialogue(prompt):
        return
    if all(isinstance(text, str) and text.startswith(prompt) for text in texts):
        raise RowError(f"both answers begin with the whole prompt, {shown(prompt)}: write the answers alone")


def _holds(begins: list[Json], prompt: list[Json]) -> bool:
    """Whether the beginning of two conversations has the prompt in it, as its own beginning or at its end."""
    if same(begins[: len(prompt)], prompt) or same(begins[-len(prompt) :], prompt):
        return True
    questions = [message for message in prompt if message["role"] == "user"]
    return len(questions) == 1 and any(same([message], questions) for message in begins)


def _spread_input(row: Row) -> None:
    """OpenAI's form of a pair: messages and tools stand within `input`."""
    inner = row.values.get("input")
    if not isinstance(inner, dict):
        raise RowError(f"input is {shown(inner)}: write an object with messages")
    row.values = {key: value for key, value in row.values.items() if key != "input"} | inner


MEDIA = ("image", "images", "video", "videos", "audio", "audios")
AUTO = "auto"
"""Of any shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of rows.

    Attributes:
        keys: what a row of it has, for people.
        fits: whether a row has them.
        read: the row's chats.
    """

    keys: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], Converted]


def converted(row: Json, copies: int = 0, shape: str = AUTO) -> Converted:
    """A row's chats.

    Args:
        copies: how many equal rows came before: they differ in their names.
        shape: the name of the shape that it has to have; `auto`: the first that fits.

    Raises:
        RowError: it has none, or another one.
    """
    held = Row(row, digest_json(row)[:16] + (f"-{copies + 1}" if copies else ""))
    for key in MEDIA:
        if held.values.get(key):
            raise RowError(f"{key} is {shown(row[key])}: rows of text alone can be imported")
    names = SHAPES if shape == AUTO else (shape,)
    shape_name = next((name for name in names if SHAPES[name].fits(held)), None)
    if shape_name is None:
        raise RowError(
            _no_shape(row) if shape == AUTO else f"it has {_keys(row)}: write {SHAPES[shape].keys}"
        )
    return replace(SHAPES[shape_name].read(held), shape=shape_name)


def renamed(row: Json, keys: Mapping[str, str]) -> Json:
    """The row with other names for some of its keys.

    Args:
        keys: name that is known here -> the row's own.

    Raises:
        RowError: the row does not have one of them.
    """
    missing = [own for own in keys.values() if own not in row]
    if missing:
        raise RowError(f"it has {_keys(row)}, and no {missing[0]}")
    own = set(keys.values())
    rest = {key: value for key, value in row.items() if key not in own | keys.keys()}
    return rest | {name: row[key] for name, key in keys.items()}


def _keys(row: Json) -> str:
    return ", ".join(sorted(row)) or "no key"


def _no_shape(row: Json) -> str:
    has = f"it has {_keys(row)}"
    if "completions" in row:
        return f"{has}: answers that are judged step by step are not read; write prompt, chosen and rejected"
    if "prompt" in row:
        return f"{has}: a prompt without an answer holds nothing to train; write completion, or messages"
    if "text" in row:
        return f"{has}: a text without roles does not say which part is an answer; write messages"
    return (
        f"{has}: write messages, prompt and completion, or prompt, chosen and rejected, or say by --key "
        "which of its keys are meant"
    )


def _speaks(row: Row, key: str) -> bool:
    """Whether a row is a whole conversation, whose messages name their speaker by this key."""
    chat = row.first(*CHATS)
    # A prompt and a completion come before a whole conversation beside them.
    if chat is None or (row.has("prompt") and row.has("completion")):
        return False
    value: Any = row.values[chat]
    if isinstance(value, str):
        sharegpt = '"from"' in value and '"role"' not in value
    else:
        first = value[0] if isinstance(value, list) and value else value
        sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return sharegpt == (key == "from")


def _is_answered(row: Row) -> bool:
    return question_and_answer(row) is not None


def _chat(row: Row) -> Converted:
    """A whole conversation, all replies of which count."""
    key = row.first(*CHATS) or "text"
    messages = messages_of(key, row.take(key), None)
    name = f"chat-{row.mark}"
    if key == "messages" and (named := row.first("trajectory", "id")) is not None:
        name = str(row.values[named])
    return Converted((line_of(row, with_system(row, messages), 0, name),), (name,))


def _single(row: Row) -> Converted:
    """A prompt and an answer, which alone counts."""
    keys = question_and_answer(row)
    assert keys is not None
    prompt = prompt_of(row, keys[0])
    answer = _answer(answer_of(row, keys[1], keys[0]), prompt, keys[1])
    label, name = row.take("label"), f"chat-{row.mark}"
    line = line_of(row, [*prompt, *answer], len(prompt), name)
    if label is not None:
        if not isinstance(label, bool):
            raise RowError(f"label is {shown(label)}: write true or false")
        line["reward"] = float(label)
    return Converted((line,), (name,))


def _alpaca(row: Row) -> Converted:
    """An instruction and its answer; those of `history` stand before them, and count too."""
    before: list[Json] = []
    for index, two in enumerate(row.take("history") or ()):
        if not (isinstance(two, list) and len(two) == 2 and all(isinstance(text, str) for text in two)):
            raise RowError(f"history[{index}] is {shown(two)}: write a list of an instruction and its answer")
        before += messages_of("history", two, None)
    chat = _single(row)
    if not before:
        return chat
    [line] = chat.lines
    at = int(line["messages"][0]["role"] == "system")
    messages = [*line["messages"][:at], *before, *line["messages"][at:]]
    return replace(chat, lines=(line | {"messages": messages, "context": 0},))


def _answer(messages: list[Json], prompt: list[Json], key: str) -> list[Json]:
    """An answer, without the prompt in front of it where it repeats the prompt."""
    if messages[0]["role"] == "assistant":
        return messages
    own = prompt[1:] if prompt[0]["role"] == "system" and messages[0]["role"] != "system" else prompt
    if len(messages) == len(own) or not same(messages[: len(own)], own):
        raise RowError(other_prompt(key, messages))
    return messages[len(own) :]


SHAPES: dict[str, Shape] = {
    "preference": Shape("chosen and rejected", is_pair, pair),
    "messages": Shape("messages with role and content", lambda row: _speaks(row, "role"), _chat),
    "sharegpt": Shape("conversations with from and value", lambda row: _speaks(row, "from"), _chat),
    "alpaca": Shape(
        "instruction and output", lambda row: row.has("instruction") and _is_answered(row), _alpaca
    ),
    "prompt-completion": Shape("prompt and completion", _is_answered, _single),
    "dialogue": Shape(
        "text, a dialogue of Human: and Assistant:", lambda row: is_dialogue(row.values.get("text")), _chat
    ),
}
"""By name, in the order in which they are looked for."""
