"""Writes tests/data/format-1-routing: steps of a training that replays routing, as the release that brought
it does.

    python tests/data/make_golden_routing.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first
replayed nothing, and a live one with the third. What they say is in `format-1-routing.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import golden_step, write_golden

FOLDER = Path(__file__).parent / "format-1-routing"
STORE_ID = "01900000-0000-7000-8000-000000000013"


def main() -> None:
    """Write the store."""
    first, second, third = (golden_step(number, routing_replay=bool(number)) for number in range(3))
    segments: list[list[Any]] = [[*first, *second], third]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
