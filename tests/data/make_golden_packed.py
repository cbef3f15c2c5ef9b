"""Writes tests/data/format-1-packed: steps whose samples are packed, as the release that brought them does.

    python tests/data/make_golden_packed.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first is
padded, and a live one with the third. What they say is in `format-1-packed.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import golden_step, write_golden

FOLDER = Path(__file__).parent / "format-1-packed"
STORE_ID = "01900000-0000-7000-8000-000000000010"


def main() -> None:
    """Write the store."""
    first, second, third = (golden_step(number, packed=number > 0) for number in range(3))
    segments: list[list[Any]] = [[*first, *second], third]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
