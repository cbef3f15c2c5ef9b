"""After a crash every acknowledged event is there; torn tails go, damage is refused and left as it is."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError, StoreError
from rollbook.store.log.recovery import recover_lane
from rollbook.store.wal.files import Watermark, quarantined
from rollbook.store.wal.frame import BATCH_FRAME, EMPTY_CHAIN, HEADER_FRAME, encode_frame, scan


def _errors(store: Store) -> list[str]:
    return [event.record.error for event in store.events()]  # type: ignore[union-attr]


def _bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file but the note that a damaged lane gets."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "QUARANTINED"}


@pytest.fixture
def lane(store: Store, notes: Callable[..., list[Event]]) -> Path:
    """Folder of a lane of three segments: 2 + 2 events, then three frames of one event each."""
    for start in (0, 2):
        with store.writer("a") as writer:
            writer.append(notes(2, start)).result(30)
    with store.writer("a") as writer:
        for i in (4, 5, 6):
            writer.append(notes(1, i)).result(30)
    return store.path / "lanes" / "a"


def _frames(path: Path) -> list[Any]:
    data = path.read_bytes()
    return list(scan(memoryview(data), 0, len(data)))


def _set_back(lane: Path, events: int, offset: int) -> None:
    """Make the watermark say that only so much of the last segment was acknowledged."""
    (lane / "WATERMARK").write_bytes(Watermark(3, offset, events).pack())


def test_a_torn_last_frame_is_cut_off_at_every_length(
    store: Store, lane: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of an unacknowledged last frame is there, it goes and all before it stays."""
    last = lane / "00000003.wal"
    whole, frame = last.read_bytes(), _frames(last)[-1]
    _set_back(lane, 6, frame.offset)
    mark = (lane / "WATERMARK").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a thousand recoveries, and no power cut
    for length in range(frame.offset, frame.end):
        last.write_bytes(whole[:length])
        state = recover_lane(lane.parents[1], lane.name)
        torn = whole[frame.offset : length].rstrip(bytes(1))  # zeros at the end may be room for more
        assert (state.next_seq, state.truncated_bytes) == (6, len(torn))
        assert last.read_bytes() == whole[: frame.offset]
        assert state.chain == _frames(last)[-1].chain
    assert (lane / "WATERMARK").read_bytes() == mark
    assert _errors(store) == [f"note {i}" for i in range(6)]


def test_a_lane_goes_on_after_a_torn_tail(
    store: Store, notes: Callable[..., list[Event]], lane: Path
) -> None:
    """The next writer continues at the right number, and a later recovery finds one unbroken chain."""
    last = lane / "00000003.wal"
    frame = _frames(last)[-1]
    _set_back(lane, 6, frame.offset)
    with last.open("r+b") as file:
        file.truncate(frame.offset + 100)
        file.seek(frame.offset + 99)
        file.write(b"x")
    with store.writer("a") as writer:
        assert writer.recovered.truncated_bytes == 100
        assert writer.append(notes(1, 60)).result(30) == 6
    assert _errors(store) == [*(f"note {i}" for i in range(6)), "note 60"]
    assert recover_lane(lane.parents[1], lane.name).next_seq == 7


def test_whole_frames_beyond_the_watermark_are_kept_and_flushed(
    store: Store, lane: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that was written but not answered stays, and is made durable before anyone reads it."""
    _set_back(lane, 4, _frames(lane / "00000003.wal")[1].offset)
    assert store.head() == {"a": 4}
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    state = recover_lane(lane.parents[1], lane.name)
    assert (state.next_seq, state.truncated_bytes) == (7, 0)
    assert synced == [str(lane / "00000003.wal")]
    store.writer("a").close()
    assert store.head() == {"a": 7}


def _flip(name: str, place: Callable[[bytes], int]) -> Callable[[Path], None]:
    def damage(lane: Path) -> None:
        data = bytearray((lane / name).read_bytes())
        data[place(bytes(data))] ^= 1
        (lane / name).write_bytes(data)

    return damage


def _cut_file(name: str, keep: int) -> Callable[[Path], None]:
    return lambda lane: os.truncate(lane / name, keep)


def _swap_first_two(lane: Path) -> None:
    first, second = (lane / "00000001.wal").read_bytes(), (lane / "00000002.wal").read_bytes()
    (lane / "00000001.wal").write_bytes(second)
    (lane / "00000002.wal").write_bytes(first)


def _remove_segments(lane: Path) -> None:
    for path in lane.glob("*.wal"):
        path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped payload byte in an early segment": _flip("00000001.wal", lambda d: len(d) // 2),
    "flipped byte in the first header": _flip("00000001.wal", lambda d: 9),
    "flipped byte in the last acknowledged frame": _flip("00000003.wal", lambda d: len(d) - 200),
    "early segment cut short": _cut_file("00000002.wal", 1000),
    "early segment emptied": _cut_file("00000002.wal", 0),
    "last segment cut short": _cut_file("00000003.wal", 1500),
    "last segment emptied": _cut_file("00000003.wal", 0),
    "first segment gone": lambda lane: (lane / "00000001.wal").unlink(),
    "middle segment gone": lambda lane: (lane / "00000002.wal").unlink(),
    "last segment gone": lambda lane: (lane / "00000003.wal").unlink(),
    "all segments gone": _remove_segments,
    "segments swapped": _swap_first_two,
    "watermark cut short": _cut_file("WATERMARK", 31),
    "watermark emptied": _cut_file("WATERMARK", 0),
    "watermark flipped": _flip("WATERMARK", lambda d: 16),
    "watermark gone": lambda lane: (lane / "WATERMARK").unlink(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_acknowledged_events_is_refused(store: Store, lane: Path, name: str) -> None:
    """Any damage before the watermark is a CorruptionError, and no byte of the lane changes."""
    DAMAGES[name](lane)
    before = _bytes_of(lane)
    with pytest.raises(CorruptionError):
        recover_lane(lane.parents[1], lane.name)
    assert _bytes_of(lane) == before
    assert quarantined(lane)
    with pytest.raises(CorruptionError):
        store.writer("a")
    assert {k: v for k, v in _bytes_of(lane).items() if k != "LOCK"} == {
        k: v for k, v in before.items() if k != "LOCK"
    }


@pytest.mark.parametrize("name", [n for n in DAMAGES if "gone" not in n or "segment" in n])
def test_a_reader_never_skips_damage(store: Store, lane: Path, name: str) -> None:
    """A reader of a damaged lane raises CorruptionError, or (order alone changed) gives no wrong event."""
    DAMAGES[name](lane)
    with pytest.raises(CorruptionError):
        list(store.events())


def test_a_whole_frame_after_a_bad_one_is_damage(lane: Path) -> None:
    """A bad frame with a valid one behind it is no torn write: refused, though not acknowledged."""
    last = lane / "00000003.wal"
    frames = _frames(last)
    _set_back(lane, 5, frames[2].offset)
    data = bytearray(last.read_bytes())
    data[frames[2].offset + 70] ^= 1
    last.write_bytes(data)
    before = _bytes_of(lane)
    with pytest.raises(
        CorruptionError, match=f"offset {frames[2].offset} .*follows at offset {frames[3].offset}"
    ):
        recover_lane(lane.parents[1], lane.name)
    assert _bytes_of(lane) == before


def test_a_frame_that_was_moved_is_damage(lane: Path) -> None:
    """Frames of the last segment swapped in place (each valid alone) are refused by the chain."""
    last = lane / "00000003.wal"
    data, (_, b, c, d) = last.read_bytes(), _frames(last)
    assert len(data) == d.end
    last.write_bytes(data[: b.offset] + data[c.offset : c.end] + data[b.offset : b.end] + data[d.offset :])
    with pytest.raises(CorruptionError, match="chain"):
        recover_lane(lane.parents[1], lane.name)


def test_an_empty_last_segment_is_removed(
    store: Store, notes: Callable[..., list[Event]], lane: Path
) -> None:
    """A segment that was created but not written is removed, and its number used again."""
    (lane / "00000004.wal").touch()
    with store.writer("a") as writer:
        assert (writer.recovered.next_seq, writer.recovered.truncated_bytes) == (7, 0)
        assert [s.number for s in writer.recovered.segments] == [1, 2, 3]
        assert writer.append(notes(1, 7)).result(30) == 7
    assert _errors(store) == [f"note {i}" for i in range(8)]


def test_a_lane_whose_first_opening_was_cut_short(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A lane folder with only a lock and an empty watermark is a new lane."""
    folder = store.path / "lanes" / "a"
    folder.mkdir()
    (folder / "LOCK").touch()
    (folder / "WATERMARK").touch()
    with store.writer("a") as writer:
        assert writer.append(notes(1)).result(30) == 0
    assert _errors(store) == ["note 0"]


def test_foreign_files_in_a_lane_are_left_alone(store: Store, lane: Path) -> None:
    """A copy someone put beside the segments is not read, and not an error."""
    shutil.copy(lane / "00000001.wal", lane / "00000001 (copy).wal")
    assert recover_lane(lane.parents[1], lane.name).next_seq == 7
    assert len(_errors(store)) == 7


def _framed(parts: list[bytes]) -> bytes:
    """Bytes as valid frames with a valid chain: only their payloads are nonsense."""
    chain, data = EMPTY_CHAIN, b""
    for i, part in enumerate(parts):
        kind = BATCH_FRAME if i else HEADER_FRAME
        buffers, chain = encode_frame(kind, part, max(i - 1, 0), min(i, 1), chain)
        data += b"".join(buffers)
    return data


ANY_SEGMENT = st.one_of(
    st.binary(max_size=400),
    st.binary(max_size=200).map(lambda b: b"RBLF\0\0\1\0" + b),
    st.lists(st.binary(max_size=80), min_size=1, max_size=3).map(_framed),
)


@given(data=ANY_SEGMENT, acknowledged=st.integers(0, 600), events=st.integers(0, 3))
@example(data=_framed([b"", b"\xff\xff\xff\xff\x08\0\0\0junkjunk"]), acknowledged=256, events=1)
@settings(max_examples=150)
def test_arbitrary_bytes_raise_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, acknowledged: int, events: int
) -> None:
    """Any bytes as a segment, acknowledged or not, are read, recovered or refused; nothing else happens."""
    store = rb.open(tmp_path_factory.mktemp("any") / "s", create=True)
    folder = store.path / "lanes" / "a"
    folder.mkdir()
    (folder / "00000001.wal").write_bytes(data)
    (folder / "WATERMARK").write_bytes(Watermark(1, acknowledged, events).pack())
    for act in (
        lambda: list(store.events()),
        lambda: recover_lane(folder.parents[1], folder.name),
        lambda: list(store.events()),
    ):
        try:
            act()
        except StoreError:
            continue


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_after_the_end_is_cut_off(store: Store, lane: Path, junk: bytes) -> None:
    """Whatever follows the last acknowledged frame, recovery removes it and keeps every event."""
    last = lane / "00000003.wal"
    whole = last.read_bytes()
    last.write_bytes(whole + junk)
    assert len(_errors(store)) == 7
    assert recover_lane(lane.parents[1], lane.name).truncated_bytes == len(junk.rstrip(bytes(1)))
    assert last.read_bytes() == whole
    assert len(_errors(store)) == 7


# Started once, as imports take long; each line on stdin forks one writer, which runs until it is killed.
WRITERS = """
import hashlib, os, sys
from rollbook import store as rb
from rollbook.store.events import Event, TurnFailed
from rollbook.store.settings import AppendSettings

def acknowledge(events):
    def told(future):
        first = future.result()
        digests = [hashlib.sha256(e.record.error.encode()).hexdigest() for e in events]
        os.write(1, "".join(f"{first + i} {d}\\n" for i, d in enumerate(digests)).encode())
    return told

def write(store, number):
    writer = rb.open(store).writer("a", AppendSettings(segment_bytes=20_000))
    os.write(1, f"ready {os.getpid()}\\n".encode())
    while True:
        errors = [f"{number}.{i} " + "x" * (number % 900) for i in range(1 + number % 7)]
        events = [Event(TurnFailed("t", "u", error), "r") for error in errors]
        future = writer.append(events)
        future.add_done_callback(acknowledge(events))
        if number % 5 == 0:
            future.result()
        number += 1

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write(sys.argv[1], int(line))
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


def _killed_writer(process: subprocess.Popen[str], number: int, after_s: float) -> dict[int, str]:
    """Start a writer, kill it after a moment, and give what it acknowledged: seq -> digest."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    # The moment of the kill is what the test varies; nothing is waited for here.
    time.sleep(after_s)
    os.kill(int(pid), signal.SIGKILL)
    lines = iter(process.stdout.readline, "dead\n")
    return {int(seq): digest for seq, digest in (line.split() for line in lines)}


@pytest.mark.crashes
def test_nothing_acknowledged_is_lost_when_a_writer_is_killed(
    store: Store, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """15 writers are killed at random moments: every event they acknowledged is there, unchanged."""
    rng = random.Random(7)
    acknowledged: dict[int, str] = {}
    process = start_python(WRITERS, store.path)
    for attempt in range(15):
        acknowledged |= _killed_writer(process, attempt * 1_000_000, rng.uniform(0.0, 0.12))
        held = [hashlib.sha256(e.record.error.encode()).hexdigest() for e in store.events()]  # type: ignore[union-attr]
        lost = [seq for seq, digest in acknowledged.items() if seq >= len(held) or held[seq] != digest]
        assert lost == []
    assert process.communicate(timeout=30) == ("", "")
    assert len(acknowledged) > 100
    store.writer("a").close()
    assert [(e.lane, e.seq) for e in store.events()] == [("a", i) for i in range(store.head()["a"])]
    assert store.head()["a"] >= len(acknowledged)
