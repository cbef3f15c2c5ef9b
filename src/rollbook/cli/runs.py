"""Checks that the run named by `--run` is in the store; the error lists the runs that are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from difflib import SequenceMatcher

from rollbook.store.cut import Cut
from rollbook.store.errors import CutError, RollbookError
from rollbook.store.log.store import Store
from rollbook.transcript.text import visible

MOST_LISTED = 20


def check_run(log: Store, run: str, cut: Cut | None = None) -> None:
    """Check that the cut (default: head) holds the run, or a trajectory of it.

    Raises:
        CutError: there is none; the message lists those there are, the nearest names first.
    """
    runs = sorted(log.runs(cut), key=lambda name: (-_like(name, run), name))
    if run not in runs:
        more = f" and {len(runs) - MOST_LISTED} more" if len(runs) > MOST_LISTED else ""
        listed = ", ".join(map(visible, runs[:MOST_LISTED])) or "none"
        raise CutError(f"no run {visible(run)!r}; there are: {listed}{more}")


def only_run(log: Store) -> str:
    """The run of a store that holds one.

    Raises:
        CutError: it holds none, or several.
    """
    runs = sorted(log.runs())
    if len(runs) != 1:
        raise CutError(f"the store holds {len(runs)} runs: name one with --run")
    return runs[0]


def _like(name: str, wanted: str) -> float:
    return SequenceMatcher(None, name.lower(), wanted.lower()).ratio()


def cut_of(log: Store, as_of: str, run: str | None) -> Cut:
    """The cut that `--as-of` names; it holds the run, where one is named.

    Raises:
        CutError: there is no such cut, or no such run in it.
    """
    with of_run(log, run):
        cut = log.cut(as_of, run)
    if run is not None:
        check_run(log, run, cut)
    return cut


@contextlib.contextmanager
def of_run(log: Store, run: str | None) -> Iterator[None]:
    """Context: turns an error within it into an error about the run, if the run is not in the store.

    Raises:
        CutError: it is not.
    """
    try:
        yield
    except RollbookError:
        if run is not None:
            check_run(log, run)
        raise
