"""The ids that an upstream gave a reply and its parts, beside those that this code makes of the turn's. Pure.

An agent names what it was given in its next request, so a reply from a cassette has the recorded ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollbook.ingest.endpoints.responses.reply import PREFIX
from rollbook.store.events import Json, TurnCompleted


def given_ids(completed: TurnCompleted) -> Iterator[tuple[str, str]]:
    """(id as our own replies have it, id as the upstream gave it) of a response and its items."""
    turn_id, given = completed.turn_id, completed.upstream
    if isinstance(given.get("id"), str):
        yield PREFIX + turn_id, given["id"]
    calls = 0
    for item in recorded_output(completed):
        kind, item_id = item.get("type"), item.get("id")
        ours = {"reasoning": f"rs_{turn_id}", "message": f"msg_{turn_id}"}.get(str(kind))
        if kind == "function_call":
            ours, calls = f"fc_{turn_id}_{calls}", calls + 1
        if ours is not None and isinstance(item_id, str):
            yield ours, item_id


def recorded_output(completed: TurnCompleted) -> list[Json]:
    """The items of an upstream's response, as it gave them; none where it was no response."""
    return [item for item in _extra(completed, "output") if isinstance(item, dict)]


def recorded_blocks(completed: TurnCompleted) -> list[Json]:
    """The blocks of an upstream's message, where they say more than its text and calls; else none."""
    return [block for block in _extra(completed, "content") if isinstance(block, dict)]


def _extra(completed: TurnCompleted, name: str) -> list[Any]:
    choice = completed.upstream.get("choice")
    found = choice.get(name) if isinstance(choice, dict) else None
    return found if isinstance(found, list) else []
