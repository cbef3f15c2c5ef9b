"""Writes tests/data/format-1-lora: steps of a training of low-rank factors, as the release that brought them
does.

    python tests/data/make_golden_lora.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first
trained weights, and a live one with the third. What they say is in `format-1-lora.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import golden_step, write_golden

FOLDER = Path(__file__).parent / "format-1-lora"
STORE_ID = "01900000-0000-7000-8000-000000000012"


LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"], "seed": 3, "base_version": 1}


def main() -> None:
    """Write the store."""
    first, second, third = (golden_step(number, lora=LORA if number else None) for number in range(3))
    segments: list[list[Any]] = [[*first, *second], third]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
