"""Stores written by earlier releases are read to exactly the events they were given, and written on.

`tests/data/format-1` is final: its files never change, and every later release reads them to the events of
`tests/data/format-1.jsonl`. Format 0 came before the first release; it too is read for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import FormatError
from rollbook.store.events import RewardAssigned, TrajectoryOpened, TurnCompleted, TurnFailed, VersionSpan
from rollbook.store.events.event_json import from_json
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.wal.flusher import RealDisk

HEAD = {"old": 14, "private": 7, "serve": 46, "train": 14, "upkeep": 2}
DROPPED = 7
"""Events of lane `old` that retention had dropped."""


def _copy(root: Path, tmp_path: Path, name: str) -> Path:
    return shutil.copytree(root / "tests" / "data" / name, tmp_path / name)


def _files(folder: Path) -> dict[str, str]:
    """The beginning of each file's sha256."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in paths}


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store of format 1."""
    return rb.open(_copy(root, tmp_path, "format-1"))


@pytest.fixture(scope="session")
def written(root: Path) -> list[Event]:
    """The events of the golden store of format 1."""
    lines = (root / "tests" / "data" / "format-1.jsonl").read_text().splitlines()
    return [from_json(json.loads(line)) for line in lines]


# Format 1 -------------------------------------------------------------------------------------------


def test_every_event_is_what_was_written(
    golden: Store, written: list[Event], plain: Callable[[Event], dict[str, Any]]
) -> None:
    """Out of row and batch frames and sealed units, of all kinds: each field, bit for bit, in its place."""
    assert golden.store_id == "01900000-0000-7000-8000-000000000001"
    assert golden.head() == HEAD
    assert {e.kind for e in written} == set(kinds.RECORDS) - NEWER_KINDS
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written]
    assert len(events) == sum(HEAD.values()) - DROPPED
    assert [(e.lane, e.seq) for e in events[:5]] == [("old", i) for i in range(7, 12)]


NEWER_KINDS = frozenset(
    {
        *("engine.controlled", "step.abandoned", "segment.repaired", "preference.added"),
        *("eval.finished", "stop.fired", "step.vectors", "checkpoint.removed"),
        *("launch.started", "launch.ended", "launch.leaked", "eval.started", "eval.sampled"),
        *("session.opened", "session.ended", "sampler.opened", "operation.accepted", "operation.ended"),
        *("weights.changed", "weights.copied", "weights.freed", "lane.ordered"),
        "event.orphaned",
    }
)
"""Kinds that came after format 1's golden store was written."""


def test_what_the_golden_events_say(golden: Store) -> None:
    """Values spelled out here, so that neither the list of events nor its reader can change unseen."""
    events = {e.event_id: e for e in golden.events({"serve": 46})}
    assert [e.seq for e in events.values()] == list(range(46))
    opened = next(e for e in events.values() if e.record == _ALPHA)
    assert (opened.event_id, opened.run, opened.time_us) == ("e-serve-02", "golden", 1_700_000_000_000_002)
    requested, odd, answered = (events[f"e-serve-{i:02}"].record for i in (3, 7, 4))
    assert requested.messages == [
        {"role": "system", "content": "You are terse. é✓ " + "Never guess; look it up. " * 12},
        {"role": "user", "content": "u1?"},
    ]
    assert requested.request["metadata"] == {"$body": "mine"}
    assert requested.request["tools"][0]["function"]["enum"][39] == "topic-39"
    assert odd.logprobs.view(np.uint32).tolist() == [0xBF000000, 0x7FC00001, 0xFF800000]
    assert (odd.prompt_ids.dtype, odd.prompt_ids.tolist()) == (np.int32, [2**31 - 1, -1, 0])
    assert (odd.policy_version, odd.version_spans, odd.finish_reason) == (None, (), "length")
    assert (answered.logprobs.dtype, answered.logprobs.tolist()) == (np.float32, [-0.5, -12.25])
    assert answered.version_spans == (VersionSpan("actor", 3, 0, 1), VersionSpan("actor", 4, 1, 2))
    bodies = [e.record for e in events.values() if e.kind == "body.stored"]
    assert len({b.digest for b in bodies}) == 3
    assert len(bodies) == 3 + 2 + 3 + 2  # in segments 1, 2, 5 and 6: a child repeats no system prompt
    assert all(hashlib.sha256(orjson.dumps(b.body)).hexdigest() == b.digest for b in bodies)


_ALPHA = TrajectoryOpened("t1", "alpha", "group", "2+2", "train", {"k": [1, 2.5, None]})


def test_the_golden_trajectories(golden: Store) -> None:
    """Trajectories fold as they did: tokens of a child, rewards superseded or not, what was erased."""
    t1, p1 = (golden.trajectory(name) for name in ("t1", "p1"))
    assert golden.trajectory("o1") is None
    assert t1 is not None
    assert p1 is not None
    assert t1.turns["u5"].completed.completion_ids.tolist() == [12, 13, 14]
    assert t1.turns["u5"].requested.parent_turn_id == "u1"
    assert (t1.turns["u3"].failed, t1.finished) == (
        TurnFailed("t1", "u3", "the engine is gone"),
        kinds.TrajectoryFinished("t1", "completed", True),
    )
    erased = p1.turns["p1-1"].completed
    assert (erased.completion_ids.tolist(), erased.reply, erased.flags) == (
        [3, 4],
        {"erased": True},
        ["odd", "text_erased"],
    )


def test_sql_over_the_golden_store(golden: Store) -> None:
    """The views answer over sealed, live, dropped and erased parts of the golden store."""
    connection = rb.connect(golden.path)
    rows = connection.execute("select trajectory_id, status from trajectories order by all").fetchall()
    assert rows == [
        ("o2", "completed"),
        ("p1", "completed"),
        ("t1", "completed"),
        ("t2", "failed"),
    ]
    count = connection.execute("select count(*), sum(len(completion_ids)) from events").fetchone()
    assert count == (sum(HEAD.values()) - DROPPED, 16)


# As root, so that the modes of the files hold for it too.
READ_ONLY = """
import ctypes, json, os, sys
from rollbook import store as rb
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
if os.geteuid() == 0 and ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) != 0:
    sys.exit("capset failed")
try:
    open(sys.argv[1] + "/x", "w")
except PermissionError:
    log = rb.open(sys.argv[1])
    count, = rb.connect(log.path).execute("select count(*) from events").fetchone()
    print(json.dumps([log.head(), len(list(log.events())), count, len(log.trajectory("t1").turns)]))
"""


def test_a_store_that_cannot_be_written_is_read(
    golden: Store, fork_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """Every way of reading works without the right to write into the store, and changes nothing."""
    before = _files(golden.path)
    folders = [golden.path, *(p for p in golden.path.rglob("*") if p.is_dir())]
    for path in [p for p in golden.path.rglob("*") if p.is_file()]:
        path.chmod(stat.S_IRUSR)
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    reader = fork_python(READ_ONLY, golden.path)
    out, err = reader.communicate(timeout=60)
    for folder in folders:
        folder.chmod(stat.S_IRWXU)
    assert reader.returncode == 0, err
    held = sum(HEAD.values()) - DROPPED
    assert json.loads(out) == [HEAD, held, held, 4]
    assert _files(golden.path) == before


@pytest.mark.parametrize("lane", sorted(HEAD))
def test_a_golden_lane_is_written_on(golden: Store, written: list[Event], plain: Any, lane: str) -> None:
    """This release recovers each lane, goes on in it, knows its old ids, and changes nothing of it."""
    old = [e for e in written if e.lane == lane]
    new = [Event(TurnFailed("t9", f"u{i}", "new"), "golden") for i in range(9)]
    with golden.writer(lane) as writer:
        assert writer.append(new[:1]).result(30) == HEAD[lane]
        assert writer.append([old[-1]]).result(30) == old[-1].seq
        assert writer.append([old[0]]).result(30) == old[0].seq
        assert writer.append(new[1:]).result(30) == HEAD[lane] + 1
    expected = [plain(e) for e in written] + [plain(e, place=False) for e in new]
    assert golden.head() == HEAD | {lane: HEAD[lane] + 9}
    lanes = {name: [e for e in golden.events() if e.lane == name] for name in HEAD}
    back = [plain(e) for events in lanes.values() for e in events if e.seq < HEAD[e.lane]]
    back += [plain(e, place=False) for e in lanes[lane][-9:]]
    assert back == expected


def test_a_golden_store_is_sealed_on(
    golden: Store, written: list[Event], plain: Callable[[Event], dict[str, Any]]
) -> None:
    """This release seals what the older one left, removes the WAL, and reads the same events."""
    (golden.path / "store.toml").write_text("[seal]\nkeep_wal_bytes = 0\n")
    report = Sealer(golden).run_once()
    assert report.damage == {}
    assert list(golden.path.glob("lanes/*/*.wal")) == []
    assert [plain(e) for e in golden.events()] == [plain(e) for e in written]


# Format 0 -------------------------------------------------------------------------------------------


@pytest.fixture
def zero(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store of format 0."""
    return rb.open(_copy(root, tmp_path, "format-0"))


def test_golden_events_of_format_0(zero: Store) -> None:
    """Every field of every golden event is what was written, bit for bit."""
    events = list(zero.events())
    assert zero.store_id == "01900000-0000-7000-8000-000000000000"
    assert [(e.lane, e.seq, e.event_id, e.run, e.time_us) for e in events] == [
        ("a", i, f"e{i}", "golden", 1_700_000_000_000_000 + i) for i in range(5)
    ]
    opened, full, bare, failed, reward = (e.record for e in events)
    assert opened == TrajectoryOpened("t", "golden", "g", None, "eval", {"k": [1, 2.5]})
    assert failed == TurnFailed("t", "u2", "the engine is gone")
    assert reward == RewardAssigned("t", None, -0.1, "agent", "e0")
    assert isinstance(full, TurnCompleted)
    assert isinstance(bare, TurnCompleted)
    assert full.logprobs is not None
    assert (full.completion_ids.dtype, full.completion_ids.tolist()) == (np.int32, [2**31 - 1, 0, 7])
    assert full.logprobs.view(np.uint32).tolist() == [0xBF000000, 0x7FC00000, 0xFF800000]
    assert full.version_spans == (VersionSpan("actor", 3, 0, 1), VersionSpan("actor", 4, 1, 3))
    assert full.prompt_ids.tolist() == bare.prompt_ids.tolist() == [1, 2]
    assert full.reply == {"content": "é✓", "n": [1, {"x": None}]}
    assert (full.prompt_length, full.prompt_sha256, full.finish_reason) == (2, "00" * 32, "stop")
    assert (full.policy, full.policy_version, full.flags) == ("actor", 4, ["odd"])
    assert (bare.completion_ids.tolist(), bare.logprobs, bare.version_spans) == ([], None, ())


def _marker(store: Path) -> Any:
    return json.loads((store / "STORE.json").read_text())


def test_reading_format_0_changes_nothing(zero: Store) -> None:
    """Opening and reading a store of format 0 leaves each of its bytes."""
    before = _files(zero.path)
    assert len(list(zero.events())) == 5
    assert _files(zero.path) == before


def test_the_marker_is_raised_before_anything_newer_is_written(
    zero: Store, notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writer makes STORE.json name format 1, durably, before it makes its first segment."""
    before = _marker(zero.path)
    calls: list[str] = []
    real_fsync, real_open = os.fsync, RealDisk.open

    def fsync(fd: int) -> None:
        real_fsync(fd)
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def open_(disk: RealDisk, path: Path) -> int:
        calls.append(f"{path.name}, the store's format is {_marker(zero.path)['format']}")
        return real_open(disk, path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(RealDisk, "open", open_)
    with zero.writer("a") as writer:
        assert writer.append(notes(1)).result(30) == 5
    assert calls[0].endswith(".creating")
    assert calls[1] == zero.path.name
    assert "00000003.wal, the store's format is 1" in calls[2:]
    assert _marker(zero.path) == before | {"format": 1}
    assert list(zero.path.glob("*.creating")) == []
    assert [e.seq for e in zero.events()] == list(range(6))


def test_the_marker_is_raised_before_sealing(zero: Store) -> None:
    """An older release would miss the WAL files of sealed segments, so it is kept out before that."""
    list(seal_closed(zero.path, "a", SealSettings(), all_of_it=True))
    assert _marker(zero.path)["format"] == 1
    assert remove_sealed_wal(zero.path, "a", current_units(zero.path, "a"), 0) == [1, 2]
    assert [e.event_id for e in zero.events()] == [f"e{i}" for i in range(5)]


def test_a_crash_while_the_marker_is_raised(zero: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short at any call, the marker is whole, and of the old format until the file is durable."""
    for call in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError("cut short")))
            with pytest.raises(OSError, match="cut short"):
                zero.writer("a")
        assert _marker(zero.path)["format"] == 0
    zero.writer("a").close()
    assert _marker(zero.path)["format"] == 1


def test_a_store_raised_meanwhile_by_a_newer_release_is_not_written(golden: Store) -> None:
    """A process that opened the store before a newer release wrote into it takes no lane after that."""
    (golden.path / "STORE.json").write_text('{"format":2,"id":"x"}')
    with pytest.raises(FormatError, match=r"format 2.*update rollbook"):
        golden.writer("serve")
    assert len(list((golden.path / "lanes" / "serve").glob("*.wal"))) == 2


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    data = root / "tests" / "data"
    assert _files(data / "format-0" / "lanes") == {
        "a/00000001.wal": "e71011edd36db299",
        "a/00000002.wal": "1f7a1e7c4f53c9d5",
        "a/WATERMARK": "772e0de3e9e09eae",
    }
    listed = "".join(f"{name} {digest}\n" for name, digest in _files(data / "format-1").items())
    pinned = hashlib.sha256(listed.encode() + (data / "format-1.jsonl").read_bytes()).hexdigest()[:16]
    assert pinned == FORMAT_1, "golden stores are never changed, only added"


FORMAT_1 = "ebb4de3240dfa3e7"
