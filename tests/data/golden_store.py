"""Writes a golden store: a sealed segment, a live one, and what they say as JSON lines beside the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.store import Store
from rollbook.store.events import Event, StepCommitted, StepPlanned
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings


def write_golden(
    folder: Path,
    store_id: str,
    lane: str,
    segments: Sequence[Sequence[Any]],
    *,
    first_us: int = 1_900_000_000_000_000,
    settings: AppendSettings | None = None,
) -> None:
    """Write records to one lane, a list of them to each segment; the first segment is sealed."""
    log, made = begin_golden(folder, store_id), 0
    for number, records in enumerate(segments):
        with log.writer(lane, settings or AppendSettings()) as writer:
            events = [
                Event(record, "golden", f"e-{made + i:02}", first_us + made + i)
                for i, record in enumerate(records)
            ]
            writer.append(events).result()
            made += len(events)
        if not number:
            list(seal_closed(log.path, lane, SealSettings(), all_of_it=True))
            remove_sealed_wal(log.path, lane, current_units(log.path, lane), 0)
    end_golden(log)


def golden_step(number: int, **more: Any) -> list[Any]:
    """A step of two samples that was planned, of which `more` is said too, and committed."""
    refs = [{"trajectory_id": "t1", "turn_id": "u0"}, {"trajectory_id": "t2", "turn_id": "u1"}]
    plan = StepPlanned(
        *(number, 1, "actor", number, "main", "serve=9", {"mask": "all"}, "rd", refs, [[[0], [1]]]),
        *({"name": "sft"}, {"lr": 0.1}, 0.1, 7, {"input_weights": f"w{number}"}, {"torch": "2.13"}),
        **more,
    )
    made = {"weights": f"w{number + 1}"}
    return [plan, StepCommitted(number, 1, "actor", number + 1, made, {"loss": 0.5})]


def begin_golden(folder: Path, store_id: str) -> Store:
    """An empty store in the place of what was there, with an id of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    open_store(folder, create=True)
    (folder / "STORE.json").write_text(f'{{"format":1,"id":"{store_id}","created_us":0}}\n')
    return open_store(folder)


def end_golden(log: Store) -> None:
    """Write what it says, and remove what is not the log."""
    lines = [json.dumps(as_json(event), ensure_ascii=False) for event in log.events()]
    log.path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    for path in [*log.path.glob("catalog.db*"), *log.path.glob("lanes/*/LOCK")]:
        path.unlink()
    for name in ("claims", "leases", "derived"):
        shutil.rmtree(log.path / name, ignore_errors=True)
