"""Rows of data sets, in the formats that TRL reads, as chats. Pure.

- `messages` (a chat): all of its replies are trained.
- `prompt` and `completion`: the prompt is context. With `label`, true or false, the reward is 1 or 0.
- `prompt`, `chosen` and `rejected`: two chats and a preference, with `margin`, and with `score_chosen` and
  `score_rejected` as their rewards. Without a prompt it is the messages that both begin with.

Each of these is a list of messages; a text stands for one message, of the user's (`prompt`) or the
assistant's. Keys that mean nothing here become labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rollbook.store.digest import digest_json
from rollbook.store.events import Json

OWN = frozenset({"prompt", "completion", "chosen", "rejected", "label", "margin"})
SCORES = frozenset({"score_chosen", "score_rejected"})


class RowError(ValueError):
    """What is wrong with a row, and what to do; the caller says which row it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The chats of a row, as lines that `rollbook import` reads.

    Attributes:
        names: of the trajectories.
        margin: of the preference, where there are two: the first is the chosen one.
    """

    lines: tuple[Json, ...]
    names: tuple[str, ...]
    margin: float | None = None


def converted(row: Json, copies: int = 0) -> Converted:
    """A row's chats.

    Args:
        copies: how many equal rows came before: they differ in their names.

    Raises:
        RowError: it has none of the formats.
    """
    mark = digest_json(row)[:16] + (f"-{copies + 1}" if copies else "")
    if "chosen" in row or "rejected" in row:
        return _pair(row, mark)
    if "completion" in row:
        return _single(row, mark)
    if "messages" in row:
        given = row.get("trajectory") or row.get("id")
        name = str(given) if given is not None else f"chat-{mark}"
        return Converted((row | {"trajectory": name},), (name,))
    raise RowError(
        f"it has {', '.join(sorted(row)) or 'no key'}: write messages, prompt and completion, or prompt, "
        "chosen and rejected"
    )


def _single(row: Json, mark: str) -> Converted:
    prompt = _messages(row, "prompt", "user")
    line = _line(row, prompt, _messages(row, "completion", "assistant"), f"chat-{mark}")
    label = row.get("label")
    if label is not None:
        if not isinstance(label, bool):
            raise RowError(f"label is {label!r}: write true or false")
        line["reward"] = float(label)
    return Converted((line,), (f"chat-{mark}",))


def _pair(row: Json, mark: str) -> Converted:
    if "chosen" not in row or "rejected" not in row:
        raise RowError("it has chosen or rejected alone: write both")
    if "prompt" in row:
        prompt = _messages(row, "prompt", "user")
        answers = [_messages(row, key, "assistant") for key in ("chosen", "rejected")]
    elif isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise RowError("chosen and rejected are texts without a prompt: write prompt, or lists of messages")
    else:
        whole = [_messages(row, key, "assistant") for key in ("chosen", "rejected")]
        shared = _shared(*whole)
        prompt, answers = whole[0][:shared], [messages[shared:] for messages in whole]
    if answers[0] == answers[1]:
        raise RowError("chosen and rejected are the same: leave the row out")
    lines, names = [], []
    for key, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer:
            raise RowError(f"{key} is only the beginning of the other: write an answer in both")
        names.append(f"pair-{mark}-{key}")
        line = _line(row, prompt, answer, names[-1]) | {"group": f"pair-{mark}"}
        if (score := _number(row, f"score_{key}")) is not None:
            line["reward"] = score
        lines.append(line)
    return Converted(tuple(lines), tuple(names), _number(row, "margin"))


def _line(row: Json, prompt: list[Json], answer: list[Json], name: str) -> Json:
    rest = {key: value for key, value in row.items() if key not in OWN | SCORES}
    return rest | {"messages": [*prompt, *answer], "context": len(prompt), "trajectory": name}


def _messages(row: Json, key: str, role: str) -> list[Json]:
    value: Any = row.get(key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return value
    raise RowError(f"{key} is {str(value)[:60]!r}: write a text, or a list of messages")


def _shared(one: list[Json], other: list[Json]) -> int:
    """How many messages both begin with."""
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _number(row: Json, key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"{key} is {value!r}: write a finite number, or leave it out")
    return float(value)
