"""Writes tests/data/format-1-repaired: a store that was repaired, as the release that brought that does.

    python tests/data/make_golden_repaired.py

It is never written again. Lane `notes` has a sealed unit of two segments. The first has no WAL file any more,
since it was damaged; lane `upkeep` says so. What they say is in `format-1-repaired.jsonl`.
"""

from __future__ import annotations

from pathlib import Path

from golden_store import begin_golden, end_golden

from rollbook.store.events import Event, SegmentRepaired, TrajectoryFinished, TrajectoryOpened
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.settings import SealSettings

FOLDER = Path(__file__).parent / "format-1-repaired"
STORE_ID = "01900000-0000-7000-8000-000000000005"


def main() -> None:
    """Write the store."""
    log = begin_golden(FOLDER, STORE_ID)
    said = SegmentRepaired("notes", 1, "00000001-00000002.1", 0, 1, "checksum mismatch")
    one = [("notes", TrajectoryOpened("t1", "one")), ("notes", TrajectoryFinished("t1"))]
    for number, (lane, record) in enumerate([*one, ("upkeep", said)]):
        with log.writer(lane) as writer:
            event = Event(record, "golden", f"e-{number:02}", 1_900_000_000_000_000 + number)
            writer.append([event]).result()
        if number == 1:
            list(seal_closed(log.path, "notes", SealSettings(), all_of_it=True))
    (FOLDER / "lanes" / "notes" / "00000001.wal").unlink()
    end_golden(log)


if __name__ == "__main__":
    main()
