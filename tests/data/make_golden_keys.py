"""Writes tests/data/format-1-keys: events that say whose key did it, as the release that brought that does.

    python tests/data/make_golden_keys.py

It is never written again. Lane `serve` has a sealed segment with a trajectory that its own key opened and a
judge rewarded, and a live one with what an operator did. What they say is in `format-1-keys.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollbook.store.events import (
    CursorMoved,
    EngineControlled,
    Event,
    LabelAdded,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

FOLDER = Path(__file__).parent / "format-1-keys"
STORE_ID = "01900000-0000-7000-8000-000000000003"


def requested(turn_id: str, wire: dict[str, Any]) -> TurnRequested:
    """A request of trajectory t1, a root."""
    said = [{"role": "user", "content": "2+2?"}]
    return TurnRequested(
        "t1", turn_id, f"r-{turn_id}", None, "first_turn", None, 0, said, {}, "m", {}, {}, "key", wire=wire
    )


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log, made = open_store(FOLDER), 0
    segments: list[list[Any]] = [
        [
            TrajectoryOpened("t1", "alpha", by="trajectory"),
            requested("u1", {"endpoint": "/v1/chat/completions", "key": "trajectory"}),
            TurnFailed("t1", "u1", "the engine is gone"),
            RewardAssigned("t1", None, 0.5, by="trajectory"),
            TrajectoryFinished("t1", "completed", True, "trajectory"),
            RewardAssigned("t1", None, 0.25, "judge", by="nightly-judge"),
            LabelAdded("t1", "u1", "quality", "low", "judge", "nightly-judge"),
        ],
        [
            requested("u2", {"endpoint": "/v1/responses"}),
            CursorMoved("board", "serve=7", "ops"),
            EngineControlled("embedded", "pause_generation", {"mode": "retract"}, None, "ops"),
            EngineControlled("embedded", "update_weight_version", {"new_version": "3"}, "not whole", None),
            RewardAssigned("t1", None, 1.0),
        ],
    ]
    for records in segments:
        with log.writer("serve", AppendSettings()) as writer:
            events = [
                Event(record, "golden", f"e-{made + i:02}", 1_900_000_000_000_000 + made + i)
                for i, record in enumerate(records)
            ]
            writer.append(events).result()
            made += len(events)
        if records is segments[0]:
            list(seal_closed(log.path, "serve", SealSettings(), all_of_it=True))
            remove_sealed_wal(log.path, "serve", current_units(log.path, "serve"), 0)
    lines = [json.dumps(as_json(event), ensure_ascii=False) for event in log.events()]
    FOLDER.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    for path in [*FOLDER.glob("catalog.db*"), *FOLDER.glob("lanes/*/LOCK")]:
        path.unlink()
    for name in ("claims", "leases", "derived"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)


if __name__ == "__main__":
    main()
