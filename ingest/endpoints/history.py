"""What earlier turns of the same trajectory said, for requests that name them instead of repeating them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollbook.store.events import Json


@dataclass(frozen=True, slots=True, eq=False)
class EarlierTurn:
    """A completed turn: the request's messages and the rest of its body, and the reply. In chat form."""

    messages: list[Json]
    request: Json
    reply: Json


History = Callable[[str], EarlierTurn | None]
"""Turn id -> the turn, if the request's trajectory has it."""


def no_history(turn_id: str) -> EarlierTurn | None:
    """The history of a trajectory that is not there yet."""
    return None
