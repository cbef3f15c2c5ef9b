"""Writes tests/data/format-1-keys: events that say whose key did it, as the release that brought that does.

    python tests/data/make_golden_keys.py

It is never written again. Lane `serve` has a sealed segment with a trajectory that its own key opened and a
judge rewarded, and a live one with what an operator did. What they say is in `format-1-keys.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import (
    CursorMoved,
    EngineControlled,
    LabelAdded,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnFailed,
    TurnRequested,
)

FOLDER = Path(__file__).parent / "format-1-keys"
STORE_ID = "01900000-0000-7000-8000-000000000003"


def requested(turn_id: str, wire: dict[str, Any]) -> TurnRequested:
    """A request of trajectory t1, a root."""
    said = [{"role": "user", "content": "2+2?"}]
    return TurnRequested(
        "t1", turn_id, f"r-{turn_id}", None, "first_turn", None, 0, said, {}, "m", {}, {}, "key", wire=wire
    )


def main() -> None:
    """Write the store."""
    segments: list[list[Any]] = [
        [
            TrajectoryOpened("t1", "alpha", by="trajectory"),
            requested("u1", {"endpoint": "/v1/chat/completions", "key": "trajectory"}),
            TurnFailed("t1", "u1", "the engine is gone"),
            RewardAssigned("t1", None, 0.5, by="trajectory"),
            TrajectoryFinished("t1", "completed", True, "trajectory"),
            RewardAssigned("t1", None, 0.25, "judge", by="nightly-judge"),
            LabelAdded("t1", "u1", "quality", "low", "judge", "nightly-judge"),
        ],
        [
            requested("u2", {"endpoint": "/v1/responses"}),
            CursorMoved("board", "serve=7", "ops"),
            EngineControlled("embedded", "pause_generation", {"mode": "retract"}, None, "ops"),
            EngineControlled("embedded", "update_weight_version", {"new_version": "3"}, "not whole", None),
            RewardAssigned("t1", None, 1.0),
        ],
    ]
    write_golden(FOLDER, STORE_ID, "serve", segments)


if __name__ == "__main__":
    main()
