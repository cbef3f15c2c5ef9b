"""Writes tests/data/format-1-repaired: a store that was repaired, as the release that brought that does.

    python tests/data/make_golden_repaired.py

It is never written again. Lane `notes` has a sealed unit of two segments. The first has no WAL file any more,
since it was damaged; lane `upkeep` says so. What they say is in `format-1-repaired.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rollbook.store.events import Event, SegmentRepaired, TrajectoryFinished, TrajectoryOpened
from rollbook.store.events.event_json import as_json
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.settings import SealSettings

FOLDER = Path(__file__).parent / "format-1-repaired"
STORE_ID = "01900000-0000-7000-8000-000000000005"


def main() -> None:
    """Write the store."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    log = open_store(FOLDER)
    said = SegmentRepaired("notes", 1, "00000001-00000002.1", 0, 1, "checksum mismatch")
    one = [("notes", TrajectoryOpened("t1", "one")), ("notes", TrajectoryFinished("t1"))]
    for number, (lane, record) in enumerate([*one, ("upkeep", said)]):
        with log.writer(lane) as writer:
            event = Event(record, "golden", f"e-{number:02}", 1_900_000_000_000_000 + number)
            writer.append([event]).result()
        if number == 1:
            list(seal_closed(log.path, "notes", SealSettings(), all_of_it=True))
    (FOLDER / "lanes" / "notes" / "00000001.wal").unlink()
    lines = [json.dumps(as_json(event), ensure_ascii=False) for event in log.events()]
    FOLDER.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    for path in [*FOLDER.glob("catalog.db*"), *FOLDER.glob("lanes/*/LOCK")]:
        path.unlink()
    for name in ("claims", "leases", "derived"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)


if __name__ == "__main__":
    main()
