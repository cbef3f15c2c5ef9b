"""Writes tests/data/format-1-replays: a recorded trajectory and a replay of it, as the release that brought
replays wrote them.

    python tests/data/make_golden_replays.py

It is never written again. Lane `replay` has a sealed segment with the recorded trajectory and the opening of
its replay, and a live one with the replay's turn. What they say is in `format-1-replays.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import TrajectoryFinished, TrajectoryOpened, TurnRequested

FOLDER = Path(__file__).parent / "format-1-replays"
STORE_ID = "01900000-0000-7000-8000-000000000014"


def main() -> None:
    """Write the store."""
    origin = {"trajectory_id": "t1", "turn_id": "u1", "how": "repeated", "policy": "actor"}
    opened = TrajectoryOpened("t2", "replay/t2", split="replay", origin=origin | {"policy_version": 3})
    segments: list[list[Any]] = [
        [TrajectoryOpened("t1", "task-1"), _asked("t1", "u1"), TrajectoryFinished("t1"), opened],
        [_asked("t2", "u2", repeats="u1"), TrajectoryFinished("t2")],
    ]
    write_golden(FOLDER, STORE_ID, "replay", segments)


def _asked(trajectory_id: str, turn_id: str, **wire: Any) -> TurnRequested:
    said = [{"role": "user", "content": "2+2?"}]
    return TurnRequested(
        *(trajectory_id, turn_id, f"r-{turn_id}", None, "first_turn", None, 0, said, {}, "m"),
        *({"seed": 5}, {}, "key", {"endpoint": "/v1/chat/completions", **wire}),
    )


if __name__ == "__main__":
    main()
