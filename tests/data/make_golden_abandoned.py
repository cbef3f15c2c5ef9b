"""Writes tests/data/format-1-abandoned: a training that went back, as the release that brought that does.

    python tests/data/make_golden_abandoned.py

It is never written again. Lane `train` has a sealed segment with two steps, and a live one in which the
second is abandoned and taken once more. What they say is in `format-1-abandoned.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollbook.store.events import (
    CheckpointWritten,
    Event,
    PolicyPublished,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
)
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

FOLDER = Path(__file__).parent / "format-1-abandoned"
STORE_ID = "01900000-0000-7000-8000-000000000004"


def step(number: int, version: int) -> list[Any]:
    """A step that was planned and committed; it consumes sample u0, u1, ..."""
    samples = [{"trajectory_id": "t1", "turn_id": f"u{min(number, 1)}"}]
    plan = StepPlanned(
        *(number, 1, "actor", version, "main", "serve=9", {"mask": "all"}, "rd", samples, [[[0]]]),
        *({"name": "sft"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{version}"}, {"torch": "2.13"}),
    )
    made = f"w{version + 1}"
    return [plan, StepCommitted(number, 1, "actor", version + 1, {"weights": made}, {"loss": 0.5})]


def written(version: int, digest: str, parent: int | None) -> list[Any]:
    """A checkpoint, published."""
    path = f"checkpoints/golden/actor/v{version:08d}"
    whole = CheckpointWritten("actor", version, path, digest, "o1", "main", 4096)
    return [whole, PolicyPublished("actor", version, parent, path, digest)]


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log, made = open_store(FOLDER), 0
    segments: list[list[Any]] = [
        [*step(0, 0), *written(1, "w1", 0), *step(1, 1)],
        [StepAbandoned(1, 1, "actor", 2, 1, 3), *written(3, "w1", 1), *step(2, 3)],
    ]
    for records in segments:
        with log.writer("train", AppendSettings()) as writer:
            events = [
                Event(record, "golden", f"e-{made + i:02}", 1_900_000_000_000_000 + made + i)
                for i, record in enumerate(records)
            ]
            writer.append(events).result()
            made += len(events)
        if records is segments[0]:
            list(seal_closed(log.path, "train", SealSettings(), all_of_it=True))
            remove_sealed_wal(log.path, "train", current_units(log.path, "train"), 0)
    lines = [json.dumps(as_json(event), ensure_ascii=False) for event in log.events()]
    FOLDER.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    for path in [*FOLDER.glob("catalog.db*"), *FOLDER.glob("lanes/*/LOCK")]:
        path.unlink()
    for name in ("claims", "leases", "derived"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)


if __name__ == "__main__":
    main()
