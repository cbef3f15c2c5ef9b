"""Writes tests/data/format-1-abandoned: a training that went back, as the release that brought that does.

    python tests/data/make_golden_abandoned.py

It is never written again. Lane `train` has a sealed segment with two steps, and a live one in which the
second is abandoned and taken once more. What they say is in `format-1-abandoned.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import (
    CheckpointWritten,
    PolicyPublished,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
)

FOLDER = Path(__file__).parent / "format-1-abandoned"
STORE_ID = "01900000-0000-7000-8000-000000000004"


def step(number: int, version: int) -> list[Any]:
    """A step that was planned and committed; it consumes sample u0, u1, ..."""
    samples = [{"trajectory_id": "t1", "turn_id": f"u{min(number, 1)}"}]
    plan = StepPlanned(
        *(number, 1, "actor", version, "main", "serve=9", {"mask": "all"}, "rd", samples, [[[0]]]),
        *({"name": "sft"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{version}"}, {"torch": "2.13"}),
    )
    made = f"w{version + 1}"
    return [plan, StepCommitted(number, 1, "actor", version + 1, {"weights": made}, {"loss": 0.5})]


def written(version: int, digest: str, parent: int | None) -> list[Any]:
    """A checkpoint, published."""
    path = f"checkpoints/golden/actor/v{version:08d}"
    whole = CheckpointWritten("actor", version, path, digest, "o1", "main", 4096)
    return [whole, PolicyPublished("actor", version, parent, path, digest)]


def main() -> None:
    """Write the store."""
    segments: list[list[Any]] = [
        [*step(0, 0), *written(1, "w1", 0), *step(1, 1)],
        [StepAbandoned(1, 1, "actor", 2, 1, 3), *written(3, "w1", 1), *step(2, 3)],
    ]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
