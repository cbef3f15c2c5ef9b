"""`rollbook plot --tensorboard`: the curves of trainings as TensorBoard's files, from the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollbook.cli.runs import check_run
from rollbook.cli.show.terminal_text import visible
from rollbook.cli.terminal import print_json, say
from rollbook.store.errors import ConfigError
from rollbook.store.events import EvalFinished, StepCommitted
from rollbook.store.inside import place_inside
from rollbook.store.open import open_store
from rollbook.train.curves.event_file import EventFile, messages
from rollbook.train.curves.points import read_points


def write_curves(
    path: Path, folder: Path, runs: Sequence[str], policy: str, as_of: str, as_json: bool
) -> None:
    """Write a file for each run, in the place of one that was written before, and say what was written.

    Raises:
        ConfigError: no step or evaluation of the policy is committed, or TensorBoard is missing.
        CutError: no such run or cut.
        CorruptionError: a file of the log is damaged.
    """
    messages()
    log = open_store(path)
    cut = log.cut(as_of, runs[0] if len(runs) == 1 else None)
    for run in runs:
        check_run(log, run, cut)
    found = {e.run for e in log.events_of([StepCommitted.KIND, EvalFinished.KIND], cut)}
    written: dict[str, int] = {}
    for run in list(dict.fromkeys(runs)) or sorted(found):
        if points := read_points(log, cut, run, policy):
            with EventFile(place_inside(folder, f"{run}/{policy}"), points):
                written[run] = len(points)
    if not written:
        raise ConfigError(
            f"policy {visible(policy)!r} has no committed step: train first, or name another --policy, --run"
        )
    if as_json:
        print_json({"folder": str(folder), "points": written})
        return
    counted = ", ".join(f"{count} points of {visible(run)}" for run, count in written.items())
    say(f"{folder}: {counted}; look with: tensorboard --logdir {folder}")
