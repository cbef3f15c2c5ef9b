"""Writes tests/data/format-1-preferences: preferences between trajectories, as the release that brought them
does.

    python tests/data/make_golden_preferences.py

It is never written again. Lane `serve` has a sealed segment with two trajectories and a preference, and a
live one with another. What they say is in `format-1-preferences.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import PreferenceAdded, TrajectoryFinished, TrajectoryOpened

FOLDER = Path(__file__).parent / "format-1-preferences"
STORE_ID = "01900000-0000-7000-8000-000000000008"


def segments() -> list[list[Any]]:
    """The records of both segments."""
    opened = [TrajectoryOpened(f"t{i}", f"task-{i}", "g", None, "train", {}) for i in (1, 2)]
    ended = [TrajectoryFinished(f"t{i}") for i in (1, 2)]
    return [
        [*opened, *ended, PreferenceAdded("t2", "t1", 0.75, "a person", "nightly-judge")],
        [PreferenceAdded("t1", "t2")],
    ]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "serve", segments())


if __name__ == "__main__":
    main()
