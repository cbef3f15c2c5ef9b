"""A store, or a part of it, as files for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.store.cut import format_cut
from rollbook.store.interchange.destination import destination
from rollbook.store.interchange.hub import export_dataset
from rollbook.store.interchange.jsonl import export_jsonl
from rollbook.store.interchange.progress import Progress, untold
from rollbook.store.interchange.selection import TrajectorySet, count_events, select
from rollbook.store.interchange.tables import export_tables
from rollbook.store.open import open_store

Exporter = Callable[[TrajectorySet, Path, Callable[[int], Any]], dict[str, int]]

FORMATS: dict[str, tuple[Exporter, bool]] = {
    "parquet": (export_tables, True),
    "jsonl": (export_jsonl, False),
    "datasets": (export_dataset, True),
}
"""Format -> what writes it, and whether into a folder."""


def export_store(
    store: Path,
    out: Path,
    format_: str,
    *,
    as_of: str = "head",
    run: str | None = None,
    split: str | None = None,
    progress: Progress = untold,
) -> dict[str, Any]:
    """Write the trajectories at a cut, of one run or split if given, to `out`; what was written.

    Args:
        format_: parquet, jsonl or datasets.

    Raises:
        NotAStoreError, CutError, CorruptionError: as `store.open` and `Store.cut`.
        InterchangeError: `out` exists or cannot be written, or the run has no trajectory.
    """
    exporter, folder = FORMATS[format_]
    log = open_store(store)
    with destination(out, folder=folder) as temporary:
        selection = select(log, as_of, run, split)
        with progress(f"export {format_}", count_events(selection)) as advance:
            rows = exporter(selection, temporary, advance)
    return {"to": str(out), "format": format_, "cut": format_cut(selection.cut), "rows": rows}
