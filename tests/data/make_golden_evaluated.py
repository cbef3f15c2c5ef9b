"""Writes tests/data/format-1-evaluated: agents evaluated at a version, as the release that brought it does.

    python tests/data/make_golden_evaluated.py

It is never written again. Lane `serve` has a sealed segment in which a training asks, and a live one in which
it is answered. What they say is in `format-1-evaluated.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import EvalSampled, EvalStarted

FOLDER = Path(__file__).parent / "format-1-evaluated"
STORE_ID = "01900000-0000-7000-8000-000000000017"


def segments() -> list[list[Any]]:
    """The records of both segments."""
    return [
        [EvalStarted("actor", 0, "p"), EvalStarted("actor", 50, "p#2")],
        [
            EvalSampled("actor", 50, "rollouts.eval.50", 64, "launching"),
            EvalSampled("actor", 50, "rollouts.eval.50", 64),
        ],
    ]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "serve", segments())


if __name__ == "__main__":
    main()
