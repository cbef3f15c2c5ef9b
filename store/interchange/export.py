"""Exports a store, or part of it, as files.

JSONL has a line per root-to-leaf path, an OpenAI-style chat with the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook.store.cut import format_cut
from rollbook.store.events import Json
from rollbook.store.fold.path_tokens import PathTokens
from rollbook.store.interchange.destination import Progress, destination, no_progress
from rollbook.store.interchange.hub import export_dataset
from rollbook.store.interchange.paths import PathRow, paths
from rollbook.store.interchange.selection import TrajectorySet, count_events, select, trajectories
from rollbook.store.interchange.tables import export_tables
from rollbook.store.open import open_store


def export_jsonl(selection: TrajectorySet, file: Path, advance: Callable[[int], Any]) -> dict[str, int]:
    """Write every path of the selected trajectories; how many of both.

    In memory: what `trajectories` holds, and one line.

    Raises:
        CorruptionError: acknowledged bytes are damaged.
    """
    counts = {"trajectories": 0, "paths": 0}
    with file.open("wb") as out:
        for trajectory in trajectories(selection, advance):
            counts["trajectories"] += 1
            for path in paths(trajectory):
                out.write(orjson.dumps(as_json(path)) + b"\n")
                counts["paths"] += 1
    return counts


def as_json(path: PathRow) -> Json:
    """The path as plain JSON values. NaN and a version of -1 become null; `tools` and
    `chat_template_kwargs` are there if sent.

    A float32 is written as the float64 of the same value, so that it reads back to the same
    bits.
    """
    sent = {} if path.tools is None else {"tools": path.tools}
    if path.template_kwargs:
        sent["chat_template_kwargs"] = path.template_kwargs
    turns = [
        row | {"completion_ids": row["completion_ids"].tolist(), "logprobs": _floats(row["logprobs"])}
        for row in path.turn_rows()
    ]
    return {"messages": path.messages, **sent, **path.head(), "turns": turns, "tokens": _tokens(path.tokens)}


def _tokens(tokens: PathTokens) -> Json:
    return {
        "input_ids": tokens.tokens.tolist(),
        "loss_mask": tokens.loss_mask.astype(int).tolist(),
        "logprobs": _floats(tokens.logprobs),
        "versions": [None if version < 0 else version for version in tokens.versions.tolist()],
    }


def _floats(values: np.ndarray[Any, np.dtype[np.float32]] | None) -> list[float | None] | None:
    """float64 of the same value each; null for values that JSON has no number for (NaN: none was given)."""
    if values is None:
        return None
    return [value if np.isfinite(value) else None for value in values.tolist()]


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
    progress: Progress = no_progress,
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
