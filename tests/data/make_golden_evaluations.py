"""Writes tests/data/format-1-evaluations: evaluations and an early stop, as the release that brought them
does.

    python tests/data/make_golden_evaluations.py

It is never written again. Lane `train` has a sealed segment with an evaluation, and a live one with another
and a stop. What they say is in `format-1-evaluations.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollbook.store.events import EvalFinished, Event, StopFired
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

FOLDER = Path(__file__).parent / "format-1-evaluations"
STORE_ID = "01900000-0000-7000-8000-000000000009"


def segments() -> list[list[Any]]:
    """The records of both segments."""
    measured = {"loss": 0.5, "preference_accuracy": 0.75, "preference_margin": None}
    judged = [{"policy_version": version, "value": value} for version, value in ((0, 0.5), (8, 0.625))]
    rule = {"metric": "evaluation.loss", "better": "lower", "patience": 1}
    return [
        [EvalFinished("actor", 0, "p", "serve=9", "serve=12,train=3", 4, 96, 0, None, None, measured)],
        [
            EvalFinished(
                "actor", 8, "p", "serve=9", "serve=40", 4, 96, 3, 5, 7, {"loss": 0.625, "reward": 1.0}
            ),
            StopFired("actor", 8, "p", rule, judged),
        ],
    ]


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log, made = open_store(FOLDER), 0
    for number, records in enumerate(segments()):
        with log.writer("train", AppendSettings()) as writer:
            events = [
                Event(record, "golden", f"e-{made + i:02}", 1_900_000_000_000_000 + made + i)
                for i, record in enumerate(records)
            ]
            writer.append(events).result()
            made += len(events)
        if not number:
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
