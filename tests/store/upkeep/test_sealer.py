"""One pass of the sealer: what it does to each lane, and how it is started and ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.cli.store import seal as watch
from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.errors import LaneLockedError
from rollbook.store.log import store as log
from rollbook.store.sealed import seal
from rollbook.store.sealed.unit import current_units, unit_folder
from rollbook.store.settings import AppendSettings
from rollbook.store.upkeep.claim import CLAIM
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_lane
from rollbook.store.wal.files import BRIEFLY_S, Watermark, quarantined, read_watermark, take_lock
from rollbook.store.wal.frame import scan

KEEP_NOTHING = "[seal]\nkeep_wal_bytes = 0\n"


@pytest.fixture
def tidy(store: Store) -> Store:
    """A store whose sealer keeps no WAL."""
    (store.path / "store.toml").write_text(KEEP_NOTHING)
    return store


def _errors(store: Store) -> list[str]:
    return [event.record.error for event in store.events()]  # type: ignore[union-attr]


def _wal(store: Store, lane: str = "a") -> list[str]:
    return sorted(path.name for path in (store.path / "lanes" / lane).glob("*.wal"))


def test_a_lane_without_a_writer_is_sealed_to_its_end(tidy: Store, notes: Callable[..., list[Event]]) -> None:
    """All of it becomes Parquet, derived files and a row of the catalog; a writer goes on where it ended."""
    with tidy.writer("a") as writer:
        writer.append(notes(3)).result(30)
    report = Sealer(tidy).run_once()
    (lane,) = report.lanes
    assert (lane.sealed, lane.merged, lane.removed, lane.wal_files, lane.damage) == (
        ["00000001-00000001.1"],
        [],
        [],
        1,
        None,
    )
    (unit,) = current_units(tidy.path, "a")
    assert (lane.written_bytes, lane.log_bytes) == (unit.bytes, unit.segments[0].bytes)
    assert _wal(tidy) == []
    assert (tidy.path / "derived" / "a" / unit.name / "scalars.3.parquet").exists()
    catalog = Catalog.of(tidy.path)
    assert unit.name in str(catalog.rows())
    catalog.close()
    assert Sealer(tidy).run_once().idle
    with tidy.writer("a") as writer:
        assert writer.append(notes(1, 3)).result(30) == 3
        assert _wal(tidy) == ["00000002.wal"]
    assert _errors(tidy) == [f"note {i}" for i in range(4)]


def test_a_segment_that_is_written_stays(tidy: Store, notes: Callable[..., list[Event]]) -> None:
    """Beside a living writer only what is closed is sealed."""
    with tidy.writer("a", AppendSettings(segment_bytes=3000)) as writer:
        for i in range(20):
            writer.append(notes(1, i)).result(30)
        open_segment = read_watermark(tidy.path / "lanes" / "a").segment
        assert open_segment > 2
        Sealer(tidy).run_once()
        assert _wal(tidy) == [f"{open_segment:08d}.wal"]
        writer.append(notes(1, 20)).result(30)
    assert _errors(tidy) == [f"note {i}" for i in range(21)]


def test_what_a_dead_writer_left_whole_counts(tidy: Store, notes: Callable[..., list[Event]]) -> None:
    """A torn tail is cut off; whole frames beyond the watermark are sealed, as a writer would keep them."""
    with tidy.writer("a") as writer:
        for i in range(3):
            writer.append(notes(1, i)).result(30)
    path = tidy.path / "lanes" / "a" / "00000001.wal"
    data = path.read_bytes()
    frames = list(scan(memoryview(data), 0, len(data)))
    (path.parent / "WATERMARK").write_bytes(Watermark(1, frames[2].offset, 1).pack())
    path.write_bytes(data[:-1])
    assert _errors(tidy) == ["note 0"]
    assert Sealer(tidy).run_once().damage == {}
    assert _errors(tidy) == ["note 0", "note 1"]
    assert current_units(tidy.path, "a")[0].next_seq == 2
    assert verify_lane(tidy.path, "a").fault is None


def test_a_lane_that_ends_sealed_reads_while_its_wal_is_kept(
    store: Store, notes: Callable[..., list[Event]]
) -> None:
    """A writer that opened the lane and died at once leaves a watermark that fits the sealed segment."""
    with store.writer("a") as writer:
        writer.append(notes(2)).result(30)
    Sealer(store).run_once()
    from rollbook.store.log.recovery import recover_lane

    mark = recover_lane(store.path, "a").mark
    assert mark == read_watermark(store.path / "lanes" / "a")
    assert _wal(store) == ["00000001.wal"]
    assert _errors(store) == ["note 0", "note 1"]


def test_a_writer_waits_for_the_sealer_and_for_nobody_else(
    store: Store, notes: Callable[..., list[Event]]
) -> None:
    """A lock that is held briefly is waited for; another writer's is refused at once, by its number."""
    import threading

    with store.writer("a") as writer:
        writer.append(notes(1)).result(30)
    lock = store.path / "lanes" / "a" / "LOCK"
    fd = take_lock(lock, "lane", "wait", briefly=True)
    timer = threading.Timer(0.3, os.close, [fd])
    timer.start()
    begun = time.monotonic()
    with store.writer("a") as writer:
        assert time.monotonic() - begun > 0.25
        begun = time.monotonic()
        with pytest.raises(LaneLockedError, match=f"process {os.getpid()}: stop"):
            store.writer("a")
        assert time.monotonic() - begun < BRIEFLY_S * 0.9
        with pytest.raises(LaneLockedError):
            take_lock(lock, "lane", "wait", briefly=True)


def test_damage_stops_one_lane_only(tidy: Store, notes: Callable[..., list[Event]]) -> None:
    """A damaged lane is left as it is, with a note, until it is verified whole; the others are sealed."""
    for lane in "abc":
        with tidy.writer(lane) as writer:
            writer.append(notes(9)).result(30)
    path = tidy.path / "lanes" / "b" / "00000001.wal"
    data = path.read_bytes()
    path.write_bytes(data[:-100] + b"x" + data[-99:])
    report = Sealer(tidy).run_once()
    assert [len(lane.sealed) for lane in report.lanes] == [1, 0, 1]
    assert list(report.damage) == ["b"]
    assert "00000001.wal: damaged at offset" in report.damage["b"]
    assert path.read_bytes() == data[:-100] + b"x" + data[-99:]
    path.write_bytes(data)
    assert Sealer(tidy).run_once().damage == {"b": quarantined(path.parent)}
    result = CliRunner().invoke(app, ["store", "seal", "--store", str(tidy.path)])
    assert result.exit_code == 1
    assert "lane b was not finished" in result.stdout
    assert CliRunner().invoke(app, ["store", "verify", "--store", str(tidy.path)]).exit_code == 0
    assert Sealer(tidy).run_once().damage == {}
    assert _wal(tidy, "b") == []


def test_wal_stays_beside_a_unit_that_lost_a_file(store: Store, notes: Callable[..., list[Event]]) -> None:
    """Before WAL files go, their unit's files have to be there in their sizes."""
    with store.writer("a") as writer:
        writer.append(notes(9)).result(30)
    sealer = Sealer(store)
    sealer.run_once()
    (unit,) = current_units(store.path, "a")
    path = unit_folder(store.path, unit) / "marks.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    (store.path / "store.toml").write_text(KEEP_NOTHING)
    assert "marks.parquet: has" in sealer.run_once().damage["a"]
    assert _wal(store) == ["00000001.wal"]
    path.write_bytes(data)
    (store.path / "lanes" / "a" / "QUARANTINED").unlink()
    assert sealer.run_once().lanes[0].wal_files == 1


def test_one_process_at_a_time_changes_units(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A second sealer is refused while the first one works; a single pass may wait for it."""
    with store.claim(CLAIM, "wait"):
        with pytest.raises(LaneLockedError, match="try again when it is done"):
            Sealer(store).run_once()
        begun = time.monotonic()
        with pytest.raises(LaneLockedError):
            Sealer(store).run_once(patience_s=0.2)
        assert time.monotonic() - begun >= 0.2
    assert Sealer(store).run_once().idle


def test_a_broken_catalog_stops_no_sealing(
    store: Store,
    notes: Callable[..., list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lane is sealed and the log says what the catalog does not know."""
    with store.writer("a") as writer:
        writer.append(notes(3)).result(30)
    for path in store.path.glob("catalog.db*"):
        path.unlink()
    (store.path / "catalog.db").write_bytes(b"no database" * 1000)
    assert [len(lane.sealed) for lane in Sealer(store).run_once().lanes] == [1]
    assert "lane a is sealed, but the catalog does not know" in caplog.text


def test_the_command_prints_what_was_done(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A table for people, one JSON object for machines; a pass with nothing to do says so in both."""
    with store.writer("a") as writer:
        writer.append(notes(3)).result(30)
    arguments = ["store", "seal", "--store", str(store.path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split()[:5] == ["a", "1", "0", "0", "0"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    report = orjson.loads(result.stdout)
    assert [(lane["lane"], lane["sealed"], lane["damage"]) for lane in report["lanes"]] == [("a", [], None)]


WATCH = "import sys; sys.argv[0] = 'rollbook'\nfrom rollbook.cli.app import main\nmain()\n"


def _sealed_in_time(store: Store, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(len(u.segments) for u in current_units(store.path, "a")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.more_but("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_watching_sealer_ends_cleanly(
    tidy: Store,
    notes: Callable[..., list[Event]],
    fork_python: Callable[..., subprocess.Popen[str]],
    number: int,
) -> None:
    """It seals what comes until it is interrupted, and then ends with exit code 0."""
    (tidy.path / "store.toml").write_text(KEEP_NOTHING + "poll_s = 0.1\n")
    process = fork_python(WATCH, "store", "seal", "--watch", "--json", "--store", tidy.path)
    for count in (1, 2):
        with tidy.writer("a") as writer:
            writer.append(notes(2, 2 * count)).result(30)
        _sealed_in_time(tidy, count)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    reports = [orjson.loads(line) for line in out.splitlines()]
    assert sum(len(lane["sealed"]) for report in reports for lane in report["lanes"]) == 2


PARENT = """
import subprocess, sys
from rollbook.ingest.serve import proxy
from rollbook.ingest.serve.proxy import sealer_beside
from pathlib import Path
proxy.PAUSE_S, proxy.END_S = 0.1, 60.0
with sealer_beside(Path(sys.argv[1])) as child:
    print(child.process.pid, flush=True)
    sys.stdin.readline()
print("ended", child.process.returncode, flush=True)
"""


def _is_gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody waited for has too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not _is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_child_ends_with_its_parent(store: Store, notes: Any, fork_python: Any) -> None:
    """Ended by its parent it exits with 0; and it ends by itself when the parent is killed."""
    with store.writer("a") as writer:
        writer.append(notes(2)).result(30)
    parent = fork_python(PARENT, store.path)
    pid = int(parent.stdout.readline())
    _sealed_in_time(store, 1)
    out, err = parent.communicate("\n", timeout=60)
    assert (out, err) == ("ended 0\n", "")
    assert _is_gone(pid)
    parent = fork_python(PARENT, store.path)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=30)
    _wait_until_gone(pid)


def test_the_child_is_started_again_when_it_dies(store: Store, notes: Any, fork_python: Any) -> None:
    """After a kill another one seals, and stderr says so."""
    parent = fork_python(PARENT, store.path)
    os.kill(int(parent.stdout.readline()), signal.SIGKILL)
    with store.writer("a") as writer:
        writer.append(notes(2)).result(30)
    _sealed_in_time(store, 1)
    out, err = parent.communicate("\n", timeout=60)
    assert out == "ended 0\n"
    assert err == "the sealer ended (exit code -9); starting it again, 1 of 5\n"


@pytest.mark.parametrize("refused", ["lock", "query"])
def test_a_watching_sealer_outlives_a_full_disk(
    tidy: Store,
    notes: Callable[..., list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: str,
) -> None:
    """It says what is wrong once, and seals when there is room again."""
    with tidy.writer("a") as writer:
        writer.append(notes(20)).result(30)
    passes = []
    stop = threading.Event()
    real = {"lock": log.take_lock, "query": seal._count_several}[refused]

    def full(*args: Any, **options: Any) -> Any:
        passes.append(1)
        if len(passes) < 3:
            wrong = {"lock": OSError(errno.ENOSPC, "No space"), "query": duckdb.IOException("No space")}
            raise wrong[refused]
        stop.set()
        return real(*args, **options)

    if refused == "lock":
        monkeypatch.setattr(log, "take_lock", full)
    else:
        monkeypatch.setattr(seal, "_count_several", full)
    monkeypatch.setattr(threading.Event, "wait", lambda *_: None)
    watch._watch(tidy, Sealer(tidy), stop, as_json=True)
    assert len(passes) >= 3
    assert capsys.readouterr().err.count("No space") == 1
    assert [unit.next_seq for unit in current_units(tidy.path, "a")] == [20]
