"""Writes tests/data/format-1-evaluations: evaluations and an early stop, as the release that brought them
does.

    python tests/data/make_golden_evaluations.py

It is never written again. Lane `train` has a sealed segment with an evaluation, and a live one with another
and a stop. What they say is in `format-1-evaluations.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import EvalFinished, StopFired

FOLDER = Path(__file__).parent / "format-1-evaluations"
STORE_ID = "01900000-0000-7000-8000-000000000009"


def segments() -> list[list[Any]]:
    """The records of both segments."""
    measured = {"loss": 0.5, "preference_accuracy": 0.75, "preference_margin": None}
    judged = [{"policy_version": version, "value": value} for version, value in ((0, 0.5), (8, 0.625))]
    rule = {"metric": "evaluation.loss", "better": "lower", "patience": 1}
    return [
        [EvalFinished("actor", 0, "p", "serve=9", "serve=12,train=3", 4, 96, 0, None, None, measured)],
        [
            EvalFinished(
                "actor", 8, "p", "serve=9", "serve=40", 4, 96, 3, 5, 7, {"loss": 0.625, "reward": 1.0}
            ),
            StopFired("actor", 8, "p", rule, judged),
        ],
    ]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "train", segments())


if __name__ == "__main__":
    main()
