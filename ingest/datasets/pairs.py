"""Rows of two answers to a prompt, of which one is better, as two chats and a preference. Pure."""

from __future__ import annotations

from rollbook.ingest.datasets.messages import RowError, is_dialogue
from rollbook.ingest.datasets.rows import (
    ANSWERS,
    CHATS,
    Converted,
    Row,
    answer_of,
    line_of,
    other_prompt,
    prompt_of,
    same,
    with_system,
)
from rollbook.store.events import Json
from rollbook.store.interchange.chats import shown

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
    """What both answers are to, and the two of them.

    Answers that begin with the assistant are to the prompt. Others are whole conversations: what both begin
    with is the prompt, and holds the one beside them, if there is one.
    """
    asked = row.first(*ANSWERS)
    texts = [row.values[key] for key in keys]
    if asked is None and not row.has(*CHATS) and any(_is_plain(text) for text in texts):
        raise RowError(
            f"{keys[0]} and {keys[1]} are texts without a prompt: write prompt, or lists of messages"
        )
    _refuse_repeated(row.values.get(asked or ""), *texts)
    said = [answer_of(row, key, asked) for key in keys]
    answers_alone = [messages[0]["role"] == "assistant" for messages in said]
    if all(answers_alone):
        key = asked or row.first(*CHATS)
        if key is None:
            raise RowError(f"{keys[0]} and {keys[1]} are answers without a prompt: write prompt")
        return prompt_of(row, key), said
    if any(answers_alone):
        raise RowError(
            f"of {keys[0]} and {keys[1]} one begins with an answer, the other does not: write both alike"
        )
    shared = next((i for i, (a, b) in enumerate(zip(*said, strict=False)) if a != b), min(map(len, said)))
    begins = said[0][:shared]
    if asked is not None and not _holds(begins, prompt_of(row, asked)):
        raise RowError(other_prompt(keys[0], said[0]))
    return begins, [messages[shared:] for messages in said]


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
    asked = [message for message in prompt if message["role"] == "user"]
    return len(asked) == 1 and any(same([message], asked) for message in begins)


def _spread_input(row: Row) -> None:
    """OpenAI's form of a pair: messages and tools stand within `input`."""
    given = row.values.get("input")
    if not isinstance(given, dict):
        raise RowError(f"input is {shown(given)}: write an object with messages")
    row.values = {key: value for key, value in row.values.items() if key != "input"} | given
