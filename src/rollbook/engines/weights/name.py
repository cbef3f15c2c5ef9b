"""The names that engines are given for the weights they serve. Pure.

A name is bound to a version by `policy.activated`, which is written only once the engine's own checksums
were compared with that version's. Its mark is used once, so a name that an engine was started with, or that
another store's processes gave it, is never taken for one of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollbook.store.ids import new_id

MARK_LENGTH = 12


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """The parts of a name. It proves nothing by itself: see `WeightLog`."""

    run: str
    policy: str
    version: int
    mark: str


def weight_name(run: str, policy: str, version: int) -> str:
    """A new name for a version. Neither run nor policy holds a slash."""
    return f"{run}/{policy}/{version}/{new_id()[-MARK_LENGTH:]}"


def read_name(name: Any) -> NamedWeights | None:
    """The parts of a name; None if Rollbook did not make it."""
    parts = str(name).split("/")
    if len(parts) != 4 or not parts[3] or (version := _number(parts[2])) is None:
        return None
    return NamedWeights(parts[0], parts[1], version, parts[3])


def version_in(name: Any) -> int | None:
    """The version, an int64, in a sender's name for its weights: a bare number, or part of a name."""
    parsed = read_name(name)
    return _number(str(name)) if parsed is None else parsed.version


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
