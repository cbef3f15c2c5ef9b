"""Writes tests/data/format-1-held: engines that serve a version, and how they hold it, as the release that
brought it does.

    python tests/data/make_golden_held.py

It is never written again. Lane `train` has a sealed segment with an engine of the process itself and one of
two ranks, and a live one with an engine of one rank, one on a GPU, and one of which it is not known how
it holds the weights. What they say is in `format-1-held.jsonl`, the weights in
`tests/fakes/models/golden_weights.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import PolicyActivated

FOLDER = Path(__file__).parent / "format-1-held"
STORE_ID = "01900000-0000-7000-8000-000000000015"
HELD = {
    "checksum": "sha256",
    "dtype": "bfloat16",
    "head_dim": 4,
    "padded": True,
    "tp_size": 2,
    "tp_ranks": [0, 1],
    "merged": ["gate_up_proj", "qkv_proj", "w13_weight", "w2_weight"],
}
ALONE = {"dtype": "float32", "padded": False, "tp_size": 1, "tp_ranks": [0], "merged": []}
DIGEST = "30914d24720188bd29dbf1f4cb980babd0d8cb889e1cdbe9d572dffcffcb182d"

TWO = "c96695fc739fe4d14349c35fb7569665b821d31b5b284426151f85fef9edc3ae"
ONE = "5bb11e45bead37c38cb702309b6eaf4301d65995363bf44de39c0d85f3ee9b79"
GPU = "26dda3cbc298564cfe10430dc0cfd2ad6e1e372a4e3289790d24d20500d24e97"
"""Digests of what engines hold of those weights: two ranks, one, and two on a GPU."""


def _served(url: str, mark: str, checksums: str = "", held: dict[str, Any] | None = None) -> PolicyActivated:
    name = mark and f"golden/actor/1/{mark}"
    return PolicyActivated("actor", 1, url, DIGEST, "checkpoints/1", name, checksums, held)


def main() -> None:
    """Write the store."""
    tiled = {"checksum": "tiled"}
    segments: list[list[Any]] = [
        [_served("embedded", ""), _served("http://two", "a", TWO, HELD)],
        [
            _served("http://one", "b", ONE, HELD | ALONE),
            _served("http://gpu", "c", GPU, HELD | tiled),
            _served("http://older", "d", TWO),
        ],
    ]
    write_golden(FOLDER, STORE_ID, "train", segments)


if __name__ == "__main__":
    main()
