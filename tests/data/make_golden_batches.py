"""Writes tests/data/format-1-batches: steps on one rollout batch, with a critic, as the release that brought
both does.

    python tests/data/make_golden_batches.py

It is never written again. Lane `train` has a sealed segment with two of three steps on a rollout batch of two
samples, and a live one with the third. What they say is in `format-1-batches.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import StepCommitted, StepPlanned

FOLDER = Path(__file__).parent / "format-1-batches"
STORE_ID = "01900000-0000-7000-8000-000000000007"


REFS = [{"trajectory_id": "t1", "turn_id": "u0"}, {"trajectory_id": "t2", "turn_id": "u1"}]


def step(number: int) -> list[Any]:
    """A step that was planned and committed; the first names the whole batch."""
    batch: dict[str, Any] = {"first_step": 0, "number": number, "steps": 3}
    if number == 0:
        batch |= {"samples": REFS, "partition": [[[0, 1]]]}
    plan = StepPlanned(
        *(number, 1, "actor", number, "main", "serve=9", {"mask": "all"}, "rd", [REFS[number % 2]], [[[0]]]),
        *({"name": "ppo"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{number}"}, {"torch": "2.13"}),
        rollout_batch=batch,
        critic={"optimizer": {"lr": 0.01}, "learning_rate": 0.01, "alone": number == 0},
    )
    made = {"weights": f"w{number + 1}", "critic_weights": f"c{number + 1}"}
    return [plan, StepCommitted(number, 1, "actor", number + 1, made, {"loss": 0.5, "value_loss": 0.25})]


def main() -> None:
    """Write the store."""
    segments: list[list[Any]] = [[*step(0), *step(1)], step(2)]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
