"""Writes tests/data/format-1-compared: steps whose samples were compared with dropped members of their
groups, as the release that brought them does.

    python tests/data/make_golden_compared.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first has
none, and a live one with the third. What they say is in `format-1-compared.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import StepCommitted, StepPlanned

FOLDER = Path(__file__).parent / "format-1-compared"
STORE_ID = "01900000-0000-7000-8000-000000000011"


OTHERS = [
    {"trajectory_id": "t3", "run": "golden", "group": "g", "reward": 0.5, "tokens": 3, "truncated": True}
]
REFS = [{"trajectory_id": "t1", "turn_id": "u0"}, {"trajectory_id": "t2", "turn_id": "u1"}]


def step(number: int) -> list[Any]:
    """A step that was planned and committed; the second and third name another member."""
    plan = StepPlanned(
        *(number, 1, "actor", number, "main", "serve=9", {"mask": "all"}, "rd", REFS, [[[0], [1]]]),
        *({"name": "sft"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{number}"}, {"torch": "2.13"}),
        others=OTHERS if number else None,
    )
    made = {"weights": f"w{number + 1}"}
    return [plan, StepCommitted(number, 1, "actor", number + 1, made, {"loss": 0.5})]


def main() -> None:
    """Write the store."""
    segments: list[list[Any]] = [[*step(0), *step(1)], step(2)]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
