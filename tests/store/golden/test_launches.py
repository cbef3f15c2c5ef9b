"""Launches of agents, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import LaunchEnded, LaunchLeaked, LaunchStarted

PINNED = "c14201d19d2b00dd"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-launches", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-launches") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-launches")]


def test_what_they_say(golden: Store) -> None:
    """What was started, how it ended, what it left: written out, so that no field can change unseen."""
    started = [event.record for event in golden.events_of({LaunchStarted.KIND})]
    assert started[0] == LaunchStarted(
        trajectory_id="t1",
        launch_id="l1",
        rollout="nightly",
        place={"epoch": 0, "task": "task-7", "sample": 2},
        attempt=1,
        launcher="subprocess",
        isolation={"level": "bwrap", "processes": True, "files": True},
        owner="host-17",
        clocks={"start": 60.0, "idle": 30.5, "total": None, "scoring": 10},
        by="launching",
    )
    assert [(launch.launch_id, launch.attempt, launch.owner, launch.by) for launch in started[1:]] == [
        ("l2", 2, "host-17", None),
        ("l3", 3, "host-18", None),
    ]
    first, second = (event.record for event in golden.events_of({LaunchEnded.KIND}))
    assert first == LaunchEnded(
        trajectory_id="t1",
        launch_id="l1",
        status="agent_error",
        why="exit code 3",
        exit_code=3,
        signal=None,
        seconds=12.5,
        cpu_s=1.25,
        peak_rss_mb=96.0,
        output={
            "stdout": {"path": "out/l1/stdout.log", "bytes": 900, "kept": 512},
            "stderr": {"path": "out/l1/stderr.log", "bytes": 0, "kept": 0},
        },
        scoring={"exact": 0.5, "style": None, "judged": {"error": "the judge did not reply"}},
        by="launching",
    )
    assert second == LaunchEnded("t1", "l2", "timeout", "idle for 30.5 s", None, 15)
    [leaked] = (event.record for event in golden.events_of({LaunchLeaked.KIND}))
    processes = [{"pid": 4711, "command": "sleep 99"}, {"pid": 4712, "command": "tail -f x"}]
    assert leaked == LaunchLeaked("t1", "l1", processes, "start", "launching")


def test_the_view_reads_them(golden: Store) -> None:
    """Sealed and live, over both; what one does not have is null."""
    with rb.connect(golden.path) as connection:
        columns = "launch_id, trajectory, attempt, status, exit_code, signal, seconds, leaked, lane, seq"
        rows = connection.execute(f"select {columns} from launches order by attempt").fetchall()
    name = "nightly-0-task-7-2"
    assert rows == [
        ("l1", name, 1, "agent_error", 3, None, 12.5, 2, "serve", 1),
        ("l2", name, 2, "timeout", None, 15, None, 0, "serve", 4),
        ("l3", name, 3, "running", None, None, None, 0, "serve", 7),
    ]
