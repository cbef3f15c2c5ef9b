"""What a Responses request names instead of repeating it, found among what passed in its trajectory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.ingest.live import LiveTrajectory
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
        live: None: of a trajectory that is new, and has none.
    """

    live: LiveTrajectory | None = None

    def response(self, response_id: Any) -> EarlierResponse | None:
        """The response of that id."""
        live = self.live
        if live is None or not isinstance(response_id, str) or response_id not in live.replies:
            return None
        turn = live.tree.by_id(live.replies[response_id])
        if turn is None:
            return None
        asked = live.requests.get(turn.turn_id, {})
        return EarlierResponse(turn.messages, turn.reply, bool(asked.get("instructions")))

    def item(self, item_id: Any) -> Json | None:
        """The item of that id, of the output of any of them."""
        found = self.live is not None and isinstance(item_id, str)
        return self.live.outputs.get(item_id) if found and self.live is not None else None

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
