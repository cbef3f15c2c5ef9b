"""Rows of data sets, in the shapes in which people have them, as chats. Pure.

`SHAPES` lists them. A row is of the first whose keys it has, unless one is asked for by name. What a key may
hold is in `messages`. Keys that mean nothing here become labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollbook.ingest.datasets.messages import RowError, is_dialogue, messages_of
from rollbook.ingest.datasets.pairs import is_pair, pair
from rollbook.ingest.datasets.rows import (
    CHATS,
    Converted,
    Row,
    answer_of,
    line_of,
    other_prompt,
    prompt_of,
    question_and_answer,
    same,
    with_system,
)
from rollbook.store.digest import digest_json
from rollbook.store.events import Json
from rollbook.store.interchange.chats import shown

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
    found = next((name for name in names if SHAPES[name].fits(held)), None)
    if found is None:
        raise RowError(
            _no_shape(row) if shape == AUTO else f"it has {_keys(row)}: write {SHAPES[shape].keys}"
        )
    return replace(SHAPES[found].read(held), shape=found)


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


def _is_told(row: Row) -> bool:
    """Whether a row has a prompt and a completion: they come before a whole conversation beside them."""
    return row.has("prompt") and row.has("completion")


def _speaks(row: Row, key: str) -> bool:
    """Whether a row is a whole conversation, whose messages name their speaker by this key."""
    chat = row.first(*CHATS)
    if chat is None or _is_told(row):
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
        if not (isinstance(two, list) and len(two) == 2 and all(isinstance(one, str) for one in two)):
            raise RowError(f"history[{index}] is {shown(two)}: write a list of an instruction and its answer")
        before += messages_of("history", two, None)
    made = _single(row)
    if not before:
        return made
    [line] = made.lines
    at = int(line["messages"][0]["role"] == "system")
    messages = [*line["messages"][:at], *before, *line["messages"][at:]]
    return replace(made, lines=(line | {"messages": messages, "context": 0},))


def _answer(given: list[Json], prompt: list[Json], key: str) -> list[Json]:
    """An answer, without the prompt in front of it where it repeats the prompt."""
    if given[0]["role"] == "assistant":
        return given
    own = prompt[1:] if prompt[0]["role"] == "system" and given[0]["role"] != "system" else prompt
    if len(given) == len(own) or not same(given[: len(own)], own):
        raise RowError(other_prompt(key, given))
    return given[len(own) :]


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
