"""Writes tests/data/format-0, a store that later releases must read: `python tests/data/make_golden.py`.

Run it only when format 0 is replaced before its first release; after that, golden stores are kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from rollbook.store.events import (
    Event,
    RewardAssigned,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    VersionSpan,
)
from rollbook.store.lane.writer import LaneWriter
from rollbook.store.log import open_store

FOLDER = Path(__file__).parent / "format-0"
STORE_ID = "01900000-0000-7000-8000-000000000000"


def golden_records() -> list[TrajectoryOpened | TurnCompleted | TurnFailed | RewardAssigned]:
    """A few records that use every column: arrays, nulls, spans, unicode and nested JSON."""
    logprobs = np.array([-0.5, np.nan, -np.inf], np.float32)
    ids = np.array([2**31 - 1, 0, 7], np.int32)
    spans = (VersionSpan("actor", 3, 0, 1), VersionSpan("actor", 4, 1, 3))
    head = ("t", "u", "actor", 4, np.array([1, 2], np.int32), ids)
    rest = (spans, 2, "00" * 32, "stop", {"content": "é✓", "n": [1, {"x": None}]}, {}, ["odd"], {})
    return [
        TrajectoryOpened("t", "golden", "g", None, "eval", {"k": [1, 2.5]}),
        TurnCompleted(*head, logprobs, *rest),
        TurnCompleted(*head[:-1], np.empty(0, np.int32), None, (), *rest[1:]),
        TurnFailed("t", "u2", "the engine is gone"),
        RewardAssigned("t", None, -0.1, "agent", "e0"),
    ]


def main() -> None:
    """Write the store anew: one lane of two segments."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":0,"id":"{STORE_ID}","created_us":0}}\n')
    events = [Event(r, "golden", f"e{i}", 1_700_000_000_000_000 + i) for i, r in enumerate(golden_records())]
    for part in (events[:3], events[3:]):
        with LaneWriter(FOLDER, STORE_ID, "a") as writer:
            writer.append(part).result()
    (FOLDER / "lanes" / "a" / "LOCK").unlink()


if __name__ == "__main__":
    main()
