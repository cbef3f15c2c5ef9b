"""What is said of values that a pydantic model refuses: each key whole, as it stands in the values. Pure.

A model names its own inner parts as well (the branch of a union, a validator): a user never wrote those.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

MISSING = "is missing"
_LACKING = ("missing", "union_tag_not_found")
_CHOICES = ("union_tag_invalid", "union_tag_not_found")
_TYPE, _THERE = "Input should be ", "there are"


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that was refused.

    Attributes:
        keys: keys and positions that lead to it.
        inside: whether it was read as one branch of a union, of which another may be meant.
        what: what is wrong with it; empty for an unknown key.
        got: the value, as a text in brackets, where it says more.
    """

    keys: tuple[str, ...]
    inside: bool
    what: str
    got: str = ""

    @property
    def key(self) -> str:
        """The whole key."""
        return ".".join(self.keys)

    @property
    def text(self) -> str:
        """What is wrong, with the value; empty for an unknown key."""
        return self.what + self.got


def refused(error: ValidationError, values: Any) -> list[Refused]:
    """All that is wrong with values, once each: of a union the branch that comes furthest is believed."""
    found = [_of(one, values) for one in error.errors(include_url=False)]
    kept: list[Refused] = []
    for one in found:
        deeper = one.inside and any(_extends(other.keys, one.keys) for other in found)
        same = next((i for i, other in enumerate(kept) if one.inside and other.keys == one.keys), None)
        if same is not None:
            kept[same] = replace(one, what=_either(kept[same].what, one.what))
        elif not deeper:
            kept.append(one)
    return kept


def first_refused(error: ValidationError, values: Any) -> str:
    """The first thing that is wrong with values, in one line, without the value, which may be anything."""
    first = refused(error, values)[0]
    return f"{first.key}: {first.what or 'unknown key'}" if first.keys else first.what


def meant(name: str, choices: Iterable[str], of: str = "choose of") -> str:
    """What a wrong name was meant for: the nearest choice, or all of them."""
    known = list(choices)
    near = _near(name, known)
    return f"did you mean {near}?" if near else f"{of} {', '.join(known)}"


def _near(name: str, choices: Sequence[str]) -> str | None:
    """The nearest choice: one of the same letters, if there is one, and else the most alike."""
    near = difflib.get_close_matches(name, choices, 5)
    return next((one for one in near if sorted(one) == sorted(name)), near[0] if near else None)


def told(model: type[BaseModel], one: Refused) -> str:
    """What is wrong with a value; of an unknown key, what it was meant for."""
    known = [] if one.what else _keys_beside(model, one.keys)
    return one.text or f"unknown key{f': {meant(one.keys[-1], known, _THERE)}' if known else ''}"


def _keys_beside(model: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """The keys that a model has where an unknown one stands; none where its table is of no one model."""
    fields = model.model_fields
    for key in keys[:-1]:
        if key.isdecimal():
            continue
        below = list(_models(fields[key].annotation)) if key in fields else []
        if len(below) != 1:
            return []
        fields = below[0].model_fields
    return list(fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _holds(values: Any, part: int | str) -> bool:
    if isinstance(values, list | tuple):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, dict) and part in values


def _of(error: ErrorDetails, values: Any) -> Refused:
    keys: list[str] = []
    inside = False
    for place, part in enumerate(error["loc"]):
        is_last = place == len(error["loc"]) - 1
        if _holds(values, part):
            values = values[part]
        elif not (is_last and error["type"] == "missing"):
            inside = True
            continue
        keys.append(str(part))
    if error["type"] in _CHOICES:
        keys.append(error["ctx"]["discriminator"].strip("'"))
    return Refused(tuple(keys), inside, *_text(error))


def _text(error: ErrorDetails) -> tuple[str, str]:
    """(what is wrong, the value in brackets)."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "", ""
    if kind in _LACKING:
        return MISSING, ""
    if kind == "union_tag_invalid":
        choices = [choice.strip("' ") for choice in context["expected_tags"].split(",")]
        return f"there is no {context['tag']!r}: {meant(str(context['tag']), choices)}", ""
    if kind == "value_error" and isinstance(error["input"], dict):  # of a whole table
        return str(context["error"]), ""
    text = str(context["error"]) if kind == "value_error" else error["msg"]
    got = f" (got {error['input']!r}"
    if kind == "literal_error" and isinstance(error["input"], str):
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        near = _near(error["input"], choices)
        got += f": did you mean {near}?" if near else ""
    return text, f"{got})"


def _extends(keys: Sequence[str], other: Sequence[str]) -> bool:
    return len(keys) > len(other) and tuple(keys[: len(other)]) == tuple(other)


def _either(first: str, second: str) -> str:
    """What both branches of a union say of one value."""
    words = second.removeprefix(_TYPE)
    return first if words in first else f"{first} or {words}"
