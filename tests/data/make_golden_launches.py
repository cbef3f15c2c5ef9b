"""Writes tests/data/format-1-launches: launches of agents, as the release that brought them does.

    python tests/data/make_golden_launches.py

It is never written again. Lane `serve` has a sealed segment with a trajectory and a launch that ended, and a
live one with what that left behind, and with a second launch. What they say is in `format-1-launches.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import (
    LaunchEnded,
    LaunchLeaked,
    LaunchStarted,
    TrajectoryFinished,
    TrajectoryOpened,
)

FOLDER = Path(__file__).parent / "format-1-launches"
STORE_ID = "01900000-0000-7000-8000-000000000016"
NO_CLOCKS = dict.fromkeys(("start", "idle", "total", "scoring"))


def segments() -> list[list[Any]]:
    """The records of both segments."""
    place = {"epoch": 0, "task": "task-7", "sample": 2}
    isolation = {"level": "bwrap", "processes": True, "files": True}
    clocks = {"start": 60.0, "idle": 30.5, "total": None, "scoring": 10}
    streams = {"stdout": ("out/l1/stdout.log", 900, 512), "stderr": ("out/l1/stderr.log", 0, 0)}
    output = {
        stream: {"path": path, "bytes": printed, "kept": kept}
        for stream, (path, printed, kept) in streams.items()
    }
    scoring = {"exact": 0.5, "style": None, "judged": {"error": "the judge did not reply"}}
    return [
        [
            TrajectoryOpened("t1", "nightly-0-task-7-2", "nightly-0-task-7", "task-7"),
            LaunchStarted(
                *("t1", "l1", "nightly", place, 1, "subprocess", isolation, "host-17", clocks, "launching")
            ),
            LaunchEnded(
                *("t1", "l1", "agent_error", "exit code 3", 3, None, 12.5, 1.25, 96.0),
                *(output, scoring, "launching"),
            ),
        ],
        [
            LaunchLeaked(
                *("t1", "l1", [{"pid": 4711, "command": "sleep 99"}, {"pid": 4712, "command": "tail -f x"}]),
                *("start", "launching"),
            ),
            LaunchStarted("t1", "l2", "nightly", place, 2, "python", {}, "host-17", NO_CLOCKS),
            LaunchEnded("t1", "l2", "timeout", "idle for 30.5 s", None, 15),
            TrajectoryFinished("t1", "failed", False),
            LaunchStarted("t1", "l3", "nightly", place, 3, "python", {}, "host-18", NO_CLOCKS),
        ],
    ]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "serve", segments())


if __name__ == "__main__":
    main()
