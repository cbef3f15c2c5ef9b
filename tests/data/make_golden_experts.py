"""Writes tests/data/format-1-experts: turns with routed experts, as the release that brought them wrote them.

    python tests/data/make_golden_experts.py

It is never written again. Lane `serve` has a sealed segment with two turns, whose experts stand apart (u1)
and in the row (u2), and a live one with a turn that has none (u3) and a child of u1 that has (u4). What they
say is in `format-1-experts.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from golden_store import write_golden

from rollbook.store.events import TrajectoryOpened, TurnCompleted, TurnRequested, VersionSpan, token_ids
from rollbook.store.events.routed_experts import pack
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.settings import AppendSettings

FOLDER = Path(__file__).parent / "format-1-experts"
STORE_ID = "01900000-0000-7000-8000-000000000002"


def experts(start: int, positions: int, count: int) -> dict[str, Any]:
    """Experts 0 to count - 1 in turn, over 3 layers of 2."""
    ids = (np.arange(positions * 6) + start) % count
    return pack(ids.reshape(positions, 3, 2).astype(np.int32), start)


def turn(name: str, parent: str | None, prompt: list[int], new: int, routed: dict[str, Any]) -> list[Any]:
    """A turn that answers a prompt, of whose ids the last `new` are its own, with 5, 6, 7."""
    done = token_ids([5, 6, 7])
    place = (parent, None, parent, 1) if parent else (None, "first_turn", None, 0)
    said = [{"role": "user", "content": f"{name}?"}]
    logprobs = np.array([-0.5, -1.5, -0.25], np.float32)
    return [
        TurnRequested("t1", name, f"r-{name}", *place, said, {}, "m", {"temperature": 1.0}, {}, "key"),
        TurnCompleted(
            *(
                "t1",
                name,
                "actor",
                2,
                token_ids(prompt[-new:]),
                done,
                logprobs,
                (VersionSpan("actor", 2, 0, 3),),
            ),
            *(len(prompt), prompt_sha256(token_ids(prompt)), "stop", {"role": "assistant", "content": name}),
            *({"temperature": 1.0}, [], {"engine_us": 9}),
            routed_experts=routed,
        ),
    ]


def main() -> None:
    """Write the store."""
    long = list(range(100, 200))
    segments = [
        [
            TrajectoryOpened("t1", "alpha"),
            *turn("u1", None, long, 100, experts(0, 102, 128)),
            *turn("u2", None, [1, 2], 2, experts(0, 4, 8)),
        ],
        [
            *turn("u3", None, [1, 2, 3], 3, {}),
            *turn("u4", "u1", [*long, 5, 6, 7, 9], 1, experts(102, 4, 512)),
        ],
    ]
    write_golden(
        FOLDER,
        STORE_ID,
        "serve",
        segments,
        first_us=1_800_000_000_000_000,
        settings=AppendSettings(body_bytes=256),
    )


if __name__ == "__main__":
    main()
