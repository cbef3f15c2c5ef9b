"""Writes tests/data/format-1-siblings: requests for several completions, each stored once.

    python tests/data/make_golden_siblings.py

It is never written again. Lane `serve` has a sealed segment with a chat request for three completions (u1 to
u3), and a live one with a Responses request for two (u4, u5), which goes on from u1, and the turn u6, which
another engine was asked instead of u5. What they say is in `format-1-siblings.jsonl`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import TrajectoryOpened, TurnFailed, TurnRequested
from rollbook.store.fold.siblings import as_sibling

FOLDER = Path(__file__).parent / "format-1-siblings"
STORE_ID = "01900000-0000-7000-8000-000000000003"


def asked(names: list[str], parent: str | None, request: dict[str, Any], wire: dict[str, Any]) -> list[Any]:
    """The turns of one request, the later ones as siblings of the first."""
    place = (parent, None, parent, 2) if parent else (None, "first_turn", None, 0)
    said = [{"role": "user", "content": f"{names[0]}?"}]
    rest = (request, "m", {"temperature": 1.0, "seed": 7}, {"user_tag": False}, "key", wire)
    first = TurnRequested("t1", names[0], f"r-{names[0]}", *place, said, *rest)
    turns: list[Any] = [first]
    for choice, name in enumerate(names[1:], 1):
        own = wire | {"choice": choice} | ({"shared_items": 1, "items": []} if "items" in wire else {})
        sibling = replace(
            first,
            turn_id=name,
            base_turn_id=first.turn_id,
            shared_messages=first.shared_messages + 1,
            messages=[],
            sampling=first.sampling | {"seed": 7 + choice},
            wire=own,
        )
        turns.append(as_sibling(sibling, first))
    return turns


def main() -> None:
    """Write the store."""
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}], "n": 3}
    items = {"endpoint": "/v1/responses", "digest": "d2", "shared_items": 0, "items": [{"role": "user"}]}
    responses = asked(["u4", "u5"], "u1", {"store": True}, items)
    again = replace(responses[1], turn_id="u6", wire=responses[1].wire | {"instead_of": "u5"})
    segments = [
        [TrajectoryOpened("t1", "alpha"), *asked(["u1", "u2", "u3"], None, tools, {"digest": "d1"})],
        [*responses, TurnFailed("t1", "u5", "the engine went away"), again],
    ]
    write_golden(FOLDER, STORE_ID, "serve", segments, first_us=1_800_000_000_000_000)


if __name__ == "__main__":
    main()
