"""What `rollbook export` prints."""

from __future__ import annotations

from pathlib import Path

from rollbook.cli.progress import progress
from rollbook.cli.runs import of_run
from rollbook.cli.terminal import print_json, say
from rollbook.store.interchange.export import export_store
from rollbook.store.open import open_store


def run_export(
    store: Path, out: Path, format_: str, as_of: str, run: str | None, split: str | None, as_json: bool
) -> None:
    """Export, and print a summary."""
    with of_run(open_store(store), run):
        done = export_store(store, out, format_, as_of=as_of, run=run, split=split, progress=progress)
    if as_json:
        print_json(done)
        return
    rows = ", ".join(f"{count} {name}" for name, count in done["rows"].items())
    say(f"wrote {out}: {rows}, as of {done['cut']}")
