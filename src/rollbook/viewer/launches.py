"""Agents that were started: those that run, those that ended last, and the last lines that each printed."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rollbook.store.events import Event, LaunchEnded, LaunchStarted
from rollbook.viewer.snapshots import Snapshot

ENDED, SHOWN = 20, 50
"""Ended launches that are kept; and launches that a page shows."""
LINES, TAIL_BYTES = 5, 4096
"""Last lines of what an agent printed, and bytes among which they are looked for."""
_RUNNING = """
    SELECT launch_id, trajectory_id, coalesce(trajectory, '') AS name, run, rollout, launcher, attempt,
           started
    FROM launches WHERE status = 'running'"""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of an agent.

    Attributes:
        name: the client's, of the trajectory; ended: null while it runs.
        printed: its last lines; empty where they are not to be had.
    """

    launch_id: str
    trajectory_id: str
    name: str
    run: str
    rollout: str
    launcher: str
    attempt: int
    started: datetime
    ended: datetime | None = None
    status: str = "running"
    why: str = ""
    printed: str = ""


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches that run, the oldest first, and those that ended last, the newest first; `count`: that run."""

    count: int
    running: Sequence[Launch]
    ended: Sequence[Launch]


class LaunchBoard:
    """The launches that run, and the newest that ended, kept from the log's events.

    Args:
        folder: of the rollouts, where each launch has its folder; None: what they print is not shown.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._running: dict[str, Launch] = {}
        self._ended: deque[Launch] = deque(maxlen=ENDED)

    def begin(self, snapshot: Snapshot) -> None:
        """Begin with those that run at a snapshot."""
        self._ended.clear()
        self._running = {row["launch_id"]: Launch(**row) for row in snapshot.rows(_RUNNING)}

    def take(self, event: Event, name: str) -> None:
        """Note an event of a launch, of a trajectory of this name."""
        at = datetime.fromtimestamp(event.time_us / 1e6, UTC).replace(tzinfo=None)
        match event.record:
            case LaunchStarted() as started:
                self._running[started.launch_id] = Launch(
                    *(started.launch_id, started.trajectory_id, name, event.run, started.rollout),
                    *(started.launcher, started.attempt, at),
                )
            case LaunchEnded() as ended if launch := self._running.pop(ended.launch_id, None):
                self._ended.appendleft(replace(launch, ended=at, status=ended.status, why=ended.why or ""))

    def launches(self, run: str | None) -> Launches:
        """Those of a run, or of all."""
        running = [launch for launch in self._running.values() if run in (None, launch.run)]
        ended = [launch for launch in list(self._ended) if run in (None, launch.run)]
        running.sort(key=lambda launch: launch.started)
        shown = [self._with_lines(launch) for launch in running[:SHOWN]]
        return Launches(len(running), shown, [self._with_lines(launch) for launch in ended])

    def _with_lines(self, launch: Launch) -> Launch:
        if self._folder is None or not launch.name:
            return launch
        return replace(launch, printed=last_lines(self._folder, launch.name, launch.launch_id))


def last_lines(folder: Path, name: str, launch_id: str) -> str:
    """The last lines that an agent printed, of stderr where there is nothing on stdout.

    Agents write in these folders: nothing is followed out of them, and nothing but a plain file is read.
    """
    from rollbook.rollouts.launchers.agent_environment import folder_of

    place = folder_of(folder, name, launch_id)
    if place.parent != folder.resolve():
        return ""
    for stream in ("stdout", "stderr"):
        try:
            file = os.open(place / f"{stream}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                continue
            opened.seek(max(status.st_size - TAIL_BYTES, 0))
            lines = opened.read(TAIL_BYTES).decode(errors="replace").splitlines()
        if lines:
            return "\n".join(lines[-LINES:])
    return ""
