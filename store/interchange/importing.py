"""Imports chats from other sources as trajectories of text, for supervised data and comparison.

The file is checked whole before the first event is written. Each trajectory is one append: all of it is
there after a crash, or nothing. Ids of trajectories and turns follow from run, name and content, so that
importing a file again, or after a crash, adds what is missing and nothing else. (Event ids do not: those
of a lane rise with time, which its writer relies on.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollbook.store.errors import InterchangeError
from rollbook.store.events import SPLITS, Event, Json, Record, RunOpened
from rollbook.store.interchange.chat_file import ChatFile, Entry
from rollbook.store.interchange.progress import Progress, untold
from rollbook.store.interchange.records import records_of
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.sql.query import connect

IN_FLIGHT = 64
"""Trajectories that may wait for the disk at one time."""


def import_chats(
    file: Path,
    store: Path,
    run: str,
    *,
    lane: str = "import",
    split: str = "teacher",
    progress: Progress = untold,
    shape: Callable[[list[Record]], list[Record]] = list,
    origin: Path | None = None,
) -> dict[str, Any]:
    """Append the file's chats to `run`; what was added, and what was there already.

    Args:
        store: made, if nothing is there.
        lane: the lane to write; no other process may be writing it.
        split: train, eval or teacher, for chats that name none.
        shape: makes what is written of a trajectory's records.
        origin: the file that `file` was made from, if it was.

    Raises:
        InterchangeError: the file is not as it must be, or the run has another trajectory of such a name.
        LaneLockedError: another process writes the lane, or imports into the run.
        WriteFailedError: events did not become durable; those of earlier trajectories did.
    """
    if split not in SPLITS:
        raise InterchangeError(f"split is {split!r}: use one of {', '.join(SPLITS)}")
    if not run:
        raise InterchangeError("the run has no name: give one with --run")
    size = file.stat().st_size if file.is_file() else 0
    with progress(f"check {(origin or file).name}", size) as advance:
        chats = ChatFile(file, run, split, advance)
    with chats:
        log = open_store(store, create=True)
        with log.claim(f"importing into run {run}", "wait for it, and import again"):
            fresh = _fresh(log, chats, origin)
            turns, events = _write(log, chats, fresh, lane, progress, shape, origin) if fresh else (0, 0)
        return {
            "file": str(origin or file),
            "run": run,
            "lane": lane,
            "lines": chats.lines,
            "trajectories": len(chats.entries),
            "added": len(fresh),
            "already_there": len(chats.entries) - len(fresh),
            "turns": turns,
            "events": events,
        }


def _fresh(log: Store, chats: ChatFile, origin: Path | None) -> list[Entry]:
    """The file's trajectories that the run does not have.

    Raises:
        InterchangeError: the run has another one of that name.
    """
    there = trajectory_ids(log, chats.run)
    for entry in chats.entries:
        if there.get(entry.name, entry.trajectory_id) != entry.trajectory_id:
            where = f"{chats.path}, line {entry.lines[0].number}" if origin is None else f"{origin}"
            raise InterchangeError(
                f"{where}: run {chats.run!r} has a trajectory "
                f"{entry.name!r} with other content already; names are unique within a run: rename it, "
                "or name another --run"
            )
    return [entry for entry in chats.entries if entry.name not in there]


def trajectory_ids(log: Store, run: str) -> dict[str, str]:
    """Name -> id of all trajectories of a run."""
    query = (
        "SELECT json_extract_string(extra, '$.name'), trajectory_id FROM events "
        "WHERE kind = 'trajectory.opened' AND run = ?"
    )
    with connect(log.path) as connection:
        return dict(connection.execute(query, [run]).fetchall())


def _write(
    log: Store,
    chats: ChatFile,
    fresh: list[Entry],
    lane: str,
    progress: Progress,
    shape: Callable[[list[Record]], list[Record]],
    origin: Path | None,
) -> tuple[int, int]:
    """Append trajectories; how many turns and events."""
    config: Json = {
        "file": str(origin or chats.path),
        "sha256": chats.sha256,
        "lane": lane,
        "split": chats.split,
    }
    config |= {"lines": chats.lines, "trajectories": len(chats.entries), "added": len(fresh)}
    waiting: deque[Future[int]] = deque()
    turns = count = 0
    with log.writer(lane) as writer, progress(f"import {(origin or chats.path).name}", len(fresh)) as advance:
        first = [Event(RunOpened("import", config), chats.run)]
        for entry in fresh:
            records = shape(records_of(entry.trajectory_id, entry.name, chats.chats(entry)))
            events = first + [Event(record, chats.run) for record in records]
            first = []
            waiting.append(writer.append(events))
            turns += sum(event.kind == "turn.completed" for event in events)
            count += len(events)
            _settle(waiting, IN_FLIGHT, advance)
        _settle(waiting, 0, advance)
    return turns, count


def _settle(waiting: deque[Future[int]], room: int, advance: Callable[[int], Any]) -> None:
    """Wait until no more than so many appends are not durable.

    Raises:
        WriteFailedError: one never will be.
    """
    while len(waiting) > room:
        waiting.popleft().result()
        advance(1)
