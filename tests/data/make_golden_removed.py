"""Writes tests/data/format-1-removed: checkpoints that were removed, as the release that brought that does.

    python tests/data/make_golden_removed.py

It is never written again. Lane `train` has a sealed segment with two checkpoints, of which the first is
removed, and a live one in which it is written again at its path, and the second is removed. What they say is
in `format-1-removed.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import CheckpointRemoved, CheckpointWritten, PolicyPublished

FOLDER = Path(__file__).parent / "format-1-removed"
STORE_ID = "01900000-0000-7000-8000-000000000014"


def written(version: int) -> list[Any]:
    """A checkpoint, published."""
    path, digest = f"checkpoints/golden/actor/v{version:08d}", f"w{version}"
    whole = CheckpointWritten("actor", version, path, digest, f"o{version}", "main", 4096)
    return [whole, PolicyPublished("actor", version, version - 1, path, digest)]


def removed(version: int) -> CheckpointRemoved:
    """Its removal."""
    path = f"checkpoints/golden/actor/v{version:08d}"
    return CheckpointRemoved("actor", version, path, f"w{version}", f"o{version}", "[checkpoint] keep_last 1")


def main() -> None:
    """Write the store."""
    write_golden(
        FOLDER,
        STORE_ID,
        "train",
        [[*written(1), *written(2), removed(1)], [*written(1), *written(3), removed(2)]],
    )


if __name__ == "__main__":
    main()
