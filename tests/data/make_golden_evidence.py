"""Writes tests/data/format-1-evidence: steps that record what they follow from and hashes of their parts, as
the release that brought it does.

    python tests/data/make_golden_evidence.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first is
as a release before had it, and a live one with the third and its vectors. What they say is in
`format-1-evidence.jsonl`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from golden_store import golden_step, write_golden

from rollbook.store.events import SampleDropped, StepVectors

FOLDER = Path(__file__).parent / "format-1-evidence"
STORE_ID = "01900000-0000-7000-8000-000000000014"
SCHEDULE = {
    "number": 1,
    "steps": 3,
    "seed": 7,
    "micro_batch_size": None,
    "tokens_per_micro_batch": 64,
    "slice": 2,
}
HASHES = {
    "stages": ["samples", "rewards"],
    "samples": "AAECAwQFBgcICQoL",
    "tensors": {"weights": "AAECAwQFBgcICQoL"},
}


def main() -> None:
    """Write the store."""
    segments: list[list[Any]] = [golden_step(0)]
    for number in (1, 2):
        plan, committed = golden_step(number, schedule=SCHEDULE | {"number": number})
        drops = [
            SampleDropped("t3", "u2", "staleness", "rd", number, {"staleness": 2}),
            SampleDropped("t4", "u3", "no_reward", "rd", number, {}, 1, number - 1, "serve=7"),
        ]
        segments.append([*drops, plan, replace(committed, hashes=HASHES)])
    segments[0] += segments.pop(1)
    segments[1].append(StepVectors(2, 1, "actor", "logprobs", "AAAAvwAAAL8="))
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
