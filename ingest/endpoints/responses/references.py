"""What a Responses request names instead of repeating it, found among what passed in its trajectory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.ingest.trajectories.live import Contents
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True, eq=False)
class EarlierResponse:
    """A response that a later request names: the messages it answers, its reply, and whether the first of
    the messages are instructions, which do not carry over."""

    messages: list[Json]
    reply: Json
    instructed: bool


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The responses of one trajectory and their items, by the ids that the upstream gave them.

    Attributes:
        known: None: of a trajectory that is new, and has none.
    """

    known: Contents | None = None

    def response(self, response_id: Any) -> EarlierResponse | None:
        """The response of that id."""
        known = self.known
        if known is None or not isinstance(response_id, str) or response_id not in known.replies:
            return None
        turn = known.tree.by_id(known.replies[response_id])
        if turn is None:
            return None
        asked = known.requests.get(turn.turn_id, {})
        return EarlierResponse(turn.messages, turn.reply, bool(asked.get("instructions")))

    def item(self, item_id: Any) -> Json | None:
        """The item of that id, of the output of any of them."""
        return None if self.known is None or not isinstance(item_id, str) else self.known.outputs.get(item_id)

    def resolved(self, body: Json) -> tuple[Json, tuple[str, ...]]:
        """(the body with items for references to them; what it names that did not pass here)"""
        missing = [name for name in ("conversation", "prompt") if body.get(name)]
        previous = body.get("previous_response_id")
        if previous and self.response(previous) is None:
            missing.append(f"previous_response_id {previous}")
        items = body.get("input")
        if not isinstance(items, list):
            return body, tuple(missing)
        made: list[Any] = []
        for item in items:
            if not is_reference(item):
                made.append(item)
            elif (found := self.item(item["id"])) is not None:
                made.append(found)
            else:
                missing.append(f"item_reference {item['id']}")
        return body | {"input": made}, tuple(missing)


def is_reference(item: Any) -> bool:
    """Whether an item names another; its type may be left out."""
    if not isinstance(item, dict) or "id" not in item:
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() <= {"id", "type"})


def named_ids(body: Json) -> Iterator[str]:
    """Ids of the responses and items that a request names."""
    items = body.get("input")
    refers = [i["id"] for i in items if is_reference(i)] if isinstance(items, list) else []
    yield from (i for i in (body.get("previous_response_id"), *refers) if isinstance(i, str))
