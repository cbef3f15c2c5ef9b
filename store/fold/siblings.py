"""A request for n completions is stored once; converts its later turns to and from the stored form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollbook.store.events import TurnRequested

_NAMES = ("request", "honoured", "sampling", "wire")
"""Objects of a request of which a sibling holds only what differs from the first one's."""
_OWN = ("choice", "items", "shared_items")
"""Of `wire`, what belongs to a turn alone: a sibling has it only where it says so itself."""


def as_sibling(turn: TurnRequested, first: TurnRequested) -> TurnRequested:
    """The stored form of a turn, given the first turn of its request.

    Both are complete. Of an object the sibling keeps the entries that differ; if the first turn
    has an entry that this turn lacks, nothing can be left out, and the sibling keeps everything.
    """
    pairs = ((name, getattr(turn, name), getattr(first, name)) for name in _NAMES)
    differences: dict[str, Any] = {name: _difference(own, of_first, name) for name, own, of_first in pairs}
    if any(value is None for value in differences.values()):
        return turn
    return replace(turn, sibling_of=first.turn_id, **differences)


def whole(turn: TurnRequested, first: TurnRequested) -> TurnRequested:
    """The complete turn, given its stored form and the first turn of its request."""
    filled = {name: _common(getattr(first, name), name) | getattr(turn, name) for name in _NAMES}
    return replace(turn, sibling_of=None, **filled)


def _difference(own: Mapping[str, Any], first: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    common = _common(first, name)
    if common.keys() - own.keys():
        return None
    return {key: value for key, value in own.items() if key not in common or not _same(common[key], value)}


def _common(first: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in first.items() if name != "wire" or key not in _OWN}


def _same(first: Any, second: Any) -> bool:
    """Whether two JSON values are the same: 1, 1.0 and true are equal in Python, but differ in a log."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
