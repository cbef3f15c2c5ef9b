"""What `rollbook import` prints."""

from __future__ import annotations

from pathlib import Path

from rollbook.cli.progress import progress
from rollbook.cli.terminal import print_json, say
from rollbook.store.interchange.importing import import_chats


def run_import(file: Path, store: Path, run: str, lane: str, split: str, as_json: bool) -> None:
    """Import, and print a summary."""
    done = import_chats(file, store, run, lane=lane, split=split, progress=progress)
    if as_json:
        print_json(done)
        return
    there = f"; {done['already_there']} were there already" if done["already_there"] else ""
    say(f"imported {done['added']} trajectories ({done['turns']} turns) into run {run} of {store}{there}")
