"""Writes tests/data/format-1-preferences: preferences between trajectories, as the release that brought them
does.

    python tests/data/make_golden_preferences.py

It is never written again. Lane `serve` has a sealed segment with two trajectories and a preference, and a
live one with another. What they say is in `format-1-preferences.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollbook.store.events import Event, PreferenceAdded, TrajectoryFinished, TrajectoryOpened
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

FOLDER = Path(__file__).parent / "format-1-preferences"
STORE_ID = "01900000-0000-7000-8000-000000000008"


def segments() -> list[list[Any]]:
    """The records of both segments."""
    opened = [TrajectoryOpened(f"t{i}", f"task-{i}", "g", None, "train", {}) for i in (1, 2)]
    ended = [TrajectoryFinished(f"t{i}") for i in (1, 2)]
    return [
        [*opened, *ended, PreferenceAdded("t2", "t1", 0.75, "a person", "nightly-judge")],
        [PreferenceAdded("t1", "t2")],
    ]


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log, made = open_store(FOLDER), 0
    for number, records in enumerate(segments()):
        with log.writer("serve", AppendSettings()) as writer:
            events = [
                Event(record, "golden", f"e-{made + i:02}", 1_900_000_000_000_000 + made + i)
                for i, record in enumerate(records)
            ]
            writer.append(events).result()
            made += len(events)
        if not number:
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
