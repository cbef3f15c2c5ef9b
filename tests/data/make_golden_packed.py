"""Writes tests/data/format-1-packed: steps whose samples are packed, as the release that brought them does.

    python tests/data/make_golden_packed.py

It is never written again. Lane `train` has a sealed segment with two of three steps, of which the first is
padded, and a live one with the third. What they say is in `format-1-packed.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollbook.store.events import Event, StepCommitted, StepPlanned
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

FOLDER = Path(__file__).parent / "format-1-packed"
STORE_ID = "01900000-0000-7000-8000-000000000010"


REFS = [{"trajectory_id": "t1", "turn_id": "u0"}, {"trajectory_id": "t2", "turn_id": "u1"}]


def step(number: int) -> list[Any]:
    """A step that was planned and committed; the second and third are packed."""
    plan = StepPlanned(
        *(number, 1, "actor", number, "main", "serve=9", {"mask": "all"}, "rd", REFS, [[[0], [1]]]),
        *({"name": "sft"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{number}"}, {"torch": "2.13"}),
        packed=number > 0,
    )
    made = {"weights": f"w{number + 1}"}
    return [plan, StepCommitted(number, 1, "actor", number + 1, made, {"loss": 0.5})]


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log, made = open_store(FOLDER), 0
    segments: list[list[Any]] = [[*step(0), *step(1)], step(2)]
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
