"""What `rollbook import` prints."""

from __future__ import annotations

from pathlib import Path

from rollbook.cli.progress import progress
from rollbook.cli.terminal import print_json, say
from rollbook.store.errors import InterchangeError
from rollbook.store.interchange.importing import import_chats


def run_import(
    file: Path,
    store: Path,
    run: str,
    lane: str,
    split: str,
    model: Path | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Import, and print a summary.

    Raises:
        InterchangeError: the file cannot be used.
        ModelError: the model folder cannot.
    """
    if model is not None:
        from rollbook.ingest.datasets.importing import import_dataset

        done = import_dataset(
            file, store, run, model, lane=lane, split=split, skip_bad=skip_bad, progress=progress
        )
    elif file.suffix in (".json", ".parquet") or skip_bad:
        what = "--skip-bad" if skip_bad else f"a file that ends with {file.suffix}"
        raise InterchangeError(f"{what} needs --model DIR, whose tokenizer makes the tokens of its rows")
    else:
        done = import_chats(file, store, run, lane=lane, split=split, progress=progress)
    if as_json:
        print_json(done)
        return
    there = f"; {done['already_there']} were there already" if done["already_there"] else ""
    pairs = f", {done['preferences']} preferences" if done.get("preferences") else ""
    added = f"imported {done['added']} trajectories ({done['turns']} turns){pairs}"
    say(f"{added} into run {run} of {store}{there}")
    if done.get("left_out"):
        say(f"left out {done['left_out']} rows, the first: {done['first_left_out']}")
