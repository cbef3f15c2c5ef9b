"""Disks that fail, and machines that stop at any moment: what was acknowledged is there, and nothing half."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError, WriteFailedError
from rollbook.store.events import TurnFailed
from rollbook.store.log import writer as lane_writer
from rollbook.store.log.recovery import recover_lane
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.seal import remove_leftovers, seal_closed
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal import flusher
from rollbook.store.wal.files import (
    Watermark,
    lane_folder,
    quarantine,
    quarantined,
    read_watermark,
    segment_numbers,
    unpack_watermark,
)
from rollbook.store.wal.flusher import RealDisk
from rollbook.store.wal.frame import scan
from rollbook.store.wal.framer import Framer

SMALL = AppendSettings(segment_bytes=4000, linger_ms=0)


def _writer(store: Store) -> LaneWriter:
    """A writer whose disk works. The catalog has no part in this."""
    return LaneWriter(store.path, store.store_id, "a", SMALL)


def _append(number: int, count: int) -> list[Event]:
    """Events that say which append they are of, which of it, and of how many."""
    return [Event(TurnFailed("t", "u", f"{number}.{i}/{count}" + "x" * 200), "run") for i in range(count)]


def _read(store: Store) -> list[str]:
    return [event.record.error for event in store.events()]  # type: ignore[union-attr]


def _whole_appends(texts: list[str], appends: list[list[Event]]) -> int:
    """How many appends these texts are, which must be the first ones, each of them whole."""
    expected: list[str] = []
    for number, events in enumerate(appends):
        if texts == expected:
            return number
        expected += [e.record.error for e in events]  # type: ignore[union-attr]
    assert texts == expected
    return len(appends)


# A disk that fails ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a call: `code` is raised, after a write of part of its bytes; 0 for a short write."""

    code: int
    share: float


@dataclass(slots=True)
class FaultyDisk(RealDisk):
    """Fails at chosen calls, and notes a second flush of a descriptor whose flush has failed."""

    faults: Mapping[int, Fault]
    calls: int = 0
    failed: set[int] = field(default_factory=set)
    retried: bool = False

    def _fault(self) -> Fault | None:
        self.calls += 1
        return self.faults.get(self.calls - 1)

    def _raise(self, fault: Fault | None) -> None:
        if fault is not None and fault.code:
            raise OSError(fault.code, os.strerror(fault.code))

    def open(self, path: Path) -> int:
        self._raise(self._fault())
        fd = RealDisk.open(self, path)
        self.failed.discard(fd)
        return fd

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        fault = self._fault()
        if fault is None:
            return RealDisk.write(self, fd, buffers, offset)
        data = b"".join(bytes(b) for b in buffers)
        written = os.pwrite(fd, data[: max(1, int(len(data) * fault.share))], offset)
        self._raise(fault)
        return written

    def sync(self, fd: int) -> None:
        of_segment = os.readlink(f"/proc/self/fd/{fd}").endswith(".wal")
        self.retried |= of_segment and fd in self.failed
        fault = self._fault()
        if of_segment and fault is not None and fault.code:
            self.failed.add(fd)
        self._raise(fault)
        RealDisk.sync(self, fd)

    def cut(self, fd: int, size: int) -> None:
        self.retried |= fd in self.failed
        self._raise(self._fault())
        RealDisk.cut(self, fd, size)

    def sync_folder(self, fd: int) -> None:
        self._raise(self._fault())
        RealDisk.sync_folder(self, fd)

    def mark(self, fd: int, watermark: bytes) -> None:
        self._raise(self._fault())
        RealDisk.mark(self, fd, watermark)

    def probe(self, folder: Path, size: int) -> None:
        self._raise(self._fault())
        RealDisk.probe(self, folder, size)


OPENING = 8
"""Calls that open a lane: its watermark, and the header of a segment."""
FAULTS = st.builds(Fault, st.sampled_from([0, errno.ENOSPC, errno.EIO, errno.ENOMEM]), st.floats(0, 1))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that failed is tried again at once; what is short is asked for a few times."""
    _hurry(monkeypatch)


def _hurry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane_writer, "MEND_S", 0.001)
    patch.setattr(lane_writer, "REST", 0)
    patch.setattr(flusher, "FIRST_PAUSE_S", 0.0)
    patch.setattr(flusher, "PATIENCE_S", 0.001)


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@given(
    spells=st.lists(st.tuples(st.integers(OPENING, 60), st.integers(1, 12), FAULTS), max_size=4),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    pipelined=st.booleans(),
)
@settings(max_examples=40)
def test_a_disk_that_fails_for_a_while(
    tmp_path_factory: pytest.TempPathFactory,
    spells: list[tuple[int, int, Fault]],
    counts: list[int],
    pipelined: bool,
) -> None:
    """Whatever call fails, for however long: the log holds what was acknowledged, once, in that order.

    What failed is appended again, under the same ids, once the lane goes on; by itself, in the same writer.
    """
    store = rb.open(tmp_path_factory.mktemp("faulty") / "s", create=True)
    disk = FaultyDisk({at + i: fault for at, calls, fault in spells for i in range(calls)})
    done: dict[int, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        _hurry(patch)
        with LaneWriter(store.path, store.store_id, "a", SMALL, disk) as writer:
            left = [_append(i, count) for i, count in enumerate(counts)]
            while left:
                failed = _try(writer, left, done, pipelined=pipelined)
                assert failed == [] or writer.spells > 0
                _until(lambda: writer.failure is None)
                assert _read(store) == [text for _, texts in sorted(done.items()) for text in texts]
                left = failed
        assert writer.failure is None or disk.calls - 1 in disk.faults
    assert not disk.retried
    assert sorted(done) == [sum(len(texts) for at, texts in done.items() if at < seq) for seq in sorted(done)]
    assert sum(map(len, done.values())) == sum(counts)
    [verified] = verify_store(store)
    assert (verified.fault, verified.events) == (None, sum(counts))
    with _writer(store) as again:
        assert again.recovered.next_seq == sum(counts)


def _try(
    writer: LaneWriter, appends: list[list[Event]], done: dict[int, list[str]], *, pipelined: bool
) -> list[list[Event]]:
    """Append these, and note at which number each is; those that failed, each with its reason."""
    futures: list[Future[int]] = []
    for events in appends:
        futures.append(writer.append(events))
        if not pipelined:
            futures[-1].exception(30)
    failed = []
    for events, future in zip(appends, futures, strict=True):
        if (error := future.exception(30)) is None:
            done[future.result()] = [e.record.error for e in events]  # type: ignore[union-attr]
        else:
            assert isinstance(error, WriteFailedError)
            assert all(word in str(error) for word in ("lane 'a'", "of segment", "goes on by itself"))
            failed.append(events)
    return failed


class Ending(FaultyDisk):
    """Fails at every call of some names until it is told to end."""

    def __init__(self, *names: str, code: int = errno.ENOSPC) -> None:
        FaultyDisk.__init__(self, {})
        self.names, self.code, self.on = names, code, False
        self.refused = 0

    def _fault(self) -> Fault | None:
        name = sys._getframe(1).f_code.co_name
        if self.on and (name in self.names or not self.names):
            self.refused += 1
            return Fault(self.code, 0.5)
        return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_appends_are_refused_while_the_disk_fails_and_go_on_after(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """While it lasts everything is refused with the reason; afterwards the same writer goes on."""
    monkeypatch.setattr(lane_writer, "MEND_S", 0.1)
    disk = Ending(code=code)
    with LaneWriter(store.path, store.store_id, "a", SMALL, disk) as writer:
        assert writer.append(_append(0, 2)).result(30) == 0
        disk.on = True
        for _ in range(2):
            with pytest.raises(WriteFailedError, match=re.escape(os.strerror(code))):
                writer.append(_append(1, 3)).result(30)
        tried = disk.refused
        _until(lambda: disk.refused > tried + 1)
        assert os.strerror(code) in (writer.failure or "")
        disk.on = False
        _until(lambda: writer.failure is None)
        assert writer.spells == 1
        assert writer.append(_append(2, 3)).result(30) == 2
    assert _whole_appends(_read(store), [_append(0, 2), _append(2, 3)]) == 2
    assert segment_numbers(lane_folder(store.path, "a")) == [1, 2]
    assert verify_store(store)[0].fault is None


def test_a_full_disk_is_not_recovered_on_every_try(
    store: Store, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is no room for what was to be written, nothing of the lane is read again."""
    probed: list[int] = []

    class Full(Ending):
        def probe(self, folder: Path, size: int) -> None:
            probed.append(size)
            FaultyDisk.probe(self, folder, size)

    disk = Full()
    with LaneWriter(store.path, store.store_id, "a", SMALL, disk) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(lane_writer, "recover_lane", None)
            disk.on = True
            with pytest.raises(WriteFailedError):
                writer.append(_append(0, 3) + _append(1, 9000)).result(30)
            _until(lambda: len(probed) > 3)
        disk.on = False
        _until(lambda: writer.failure is None)
    assert min(probed) > 2 << 20


def test_nothing_unacknowledged_counts_after_a_failed_flush(
    store: Store, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame whose flush failed lies whole in the page cache, even where it cannot be cut off at once."""
    disk = Ending("sync", code=errno.EIO)
    real = os.ftruncate
    cuts: list[int] = []

    def refused(fd: int, size: int) -> None:
        cuts.append(size)
        if len(cuts) < 3:
            raise OSError(errno.EROFS, "read only")
        real(fd, size)

    with LaneWriter(store.path, store.store_id, "a", SMALL, disk) as writer:
        writer.append(_append(0, 1)).result(30)
        monkeypatch.setattr(os, "ftruncate", refused)
        disk.on = True
        lost = _append(1, 1)
        with pytest.raises(WriteFailedError):
            writer.append(lost).result(30)
        assert (lane_folder(store.path, "a") / "00000001.wal").stat().st_size > read_watermark(
            lane_folder(store.path, "a")
        ).offset
        disk.on = False
        _until(lambda: writer.failure is None)
        assert len(cuts) >= 3
        assert len(set(cuts)) == 1
        assert _whole_appends(_read(store), [_append(0, 1)]) == 1
        assert writer.append(lost).result(30) == 1  # not taken for one that the lane holds
    assert _whole_appends(_read(store), [_append(0, 1), lost]) == 2


def test_damage_that_a_spell_brings_to_light(store: Store, soon: None) -> None:
    """Where acknowledged events are not what they were, the lane takes nothing more, and says so."""
    disk = Ending()
    writer = LaneWriter(store.path, store.store_id, "a", SMALL, disk)
    writer.append(_append(0, 3)).result(30)
    disk.on = True
    with pytest.raises(WriteFailedError):
        writer.append(_append(1, 1)).result(30)
    wal = lane_folder(store.path, "a") / "00000001.wal"
    data = bytearray(wal.read_bytes())
    data[-100] ^= 1
    wal.write_bytes(bytes(data))
    disk.on = False
    _until(lambda: "damaged at offset" in (writer.failure or ""))
    calls = disk.calls
    with pytest.raises(WriteFailedError, match="damaged at offset"):
        writer.append(_append(1, 1)).result(30)
    assert quarantined(wal.parent) is not None
    assert disk.calls == calls
    writer.close()


def test_a_disk_that_was_mounted_anew(store: Store, soon: None) -> None:
    """Its lock is another file then: the lane goes on only where nobody else has taken that."""
    disk = Ending()
    lane = lane_folder(store.path, "a")
    with LaneWriter(store.path, store.store_id, "a", SMALL, disk) as writer:
        writer.append(_append(0, 1)).result(30)
        disk.on = True
        with pytest.raises(WriteFailedError):
            writer.append(_append(1, 1)).result(30)
        (lane / "LOCK").rename(lane / "LOCK.before")
        with _writer(store) as other:
            disk.on = False
            other.append(_append(2, 1)).result(30)
            tries = time.monotonic() + 0.2
            _until(lambda: time.monotonic() > tries)
            assert writer.failure is not None
            assert other.append(_append(3, 1)).result(30) == 2
        _until(
            lambda: "another process has written it" in (writer.failure or "")
        )  # it knows of fewer than there are
    assert _whole_appends(_read(store), [_append(0, 1), _append(2, 1), _append(3, 1)]) == 3


def test_a_fault_in_the_framer_is_a_spell_too(
    store: Store, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong before the disk, what was acknowledged counts and the lane goes on from there."""
    with _writer(store) as writer:
        writer.append(_append(0, 1)).result(30)
        with monkeypatch.context() as patch:
            patch.setattr(Framer, "jobs", lambda *_: 1 / 0)
            with pytest.raises(WriteFailedError, match="division"):
                writer.append(_append(1, 1)).result(30)
        _until(lambda: writer.failure is None)
        assert writer.append(_append(2, 1)).result(30) == 1
    assert _whole_appends(_read(store), [_append(0, 1), _append(2, 1)]) == 2


def test_a_lane_that_fails_is_closed_at_once(store: Store) -> None:
    """Who closes it does not wait for the disk."""
    disk = Ending()
    writer = LaneWriter(store.path, store.store_id, "a", SMALL, disk)
    disk.on = True
    with pytest.raises(WriteFailedError):
        writer.append(_append(0, 1)).result(30)
    begun = time.monotonic()
    writer.close()
    writer.close()
    assert time.monotonic() < begun + 20
    with _writer(store) as again:
        assert again.append(_append(1, 1)).result(30) == 0


@pytest.mark.parametrize("at", range(OPENING))
def test_a_lane_that_cannot_be_begun(store: Store, at: int) -> None:
    """It is refused, not half begun; the next writer begins it."""
    with pytest.raises(WriteFailedError, match=r"lane 'a' of .* cannot be begun: .*No space.*begin again"):
        LaneWriter(store.path, store.store_id, "a", SMALL, FaultyDisk({at: Fault(errno.ENOSPC, 0.5)}))
    with _writer(store) as writer:
        assert writer.append(_append(0, 1)).result(30) == 0


def test_what_a_failed_write_left_is_surely_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off at once; before the lane goes on behind it, the cut itself is flushed."""
    disk = Ending("sync", code=errno.EIO)
    writer = LaneWriter(store.path, store.store_id, "a", SMALL, disk)
    disk.on = True
    with pytest.raises(WriteFailedError):
        writer.append(_append(0, 1)).result(30)
    writer.close()
    flushed: list[str] = []
    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
        recover_lane(store.path, "a")
    assert flushed == [str(store.path / "lanes" / "a" / "00000001.wal")]


# A machine that stops -------------------------------------------------------------------------------


@dataclass(slots=True)
class File:
    """A segment as it went to the disk: its bytes, those that were flushed, whether its name was."""

    data: bytes = b""
    flushed: bytes = b""
    named: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Moment:
    """What the disk surely held at a moment, and what may have been on it."""

    files: dict[str, File]
    marks: tuple[bytes, ...]
    acknowledged: int


class Recorder(RealDisk):
    """Notes after each call what is on the disk. Its syncs take so long that more is appended meanwhile."""

    def __init__(self, lane: Path) -> None:
        self.moments: list[Moment] = []
        self.acknowledged = self.cuts = 0
        self._lane = lane
        self._lock = threading.RLock()
        self._syncing = False
        self._names: dict[int, str] = {}
        self._files = {p.name: File(p.read_bytes(), p.read_bytes(), True) for p in lane.glob("*.wal")}
        self._marks: list[bytes] = []

    def _note(self) -> None:
        mark = (self._lane / "WATERMARK").read_bytes()
        if unpack_watermark(mark) is not None and mark not in self._marks:
            self._marks.append(mark)
        files = {name: File(f.data, f.flushed, f.named) for name, f in self._files.items()}
        self.moments.append(Moment(files, tuple(self._marks), self.acknowledged))

    def open(self, path: Path) -> int:
        with self._lock:
            fd = RealDisk.open(self, path)
            self._names[fd] = path.name
            self._files[path.name] = File()
            self._note()
            return fd

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        with self._lock:
            assert not self._syncing  # one frame at a time
            self._note()
            file, new = self._files[self._names[fd]], b"".join(bytes(b) for b in buffers)
            file.data = file.data[:offset] + new + file.data[offset + len(new) :]
            written = RealDisk.write(self, fd, buffers, offset)
            self._note()
            return written

    def cut(self, fd: int, size: int) -> None:
        with self._lock:
            self.cuts += 1
            file = self._files[self._names[fd]]
            file.data = file.data[:size]
            self._note()
            RealDisk.cut(self, fd, size)
            file.flushed = file.data
            self._note()

    def sync(self, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("WATERMARK"):
            RealDisk.sync(self, fd)
            return
        with self._lock:
            file = self._files[self._names[fd]]
            surely = file.data
            self._syncing = True
        time.sleep(0.002)
        RealDisk.sync(self, fd)
        with self._lock:
            self._syncing = False
            file.flushed = surely
            self._note()

    def sync_folder(self, fd: int) -> None:
        with self._lock:
            RealDisk.sync_folder(self, fd)
            for file in self._files.values():
                file.named = True
            self._note()


@dataclass(frozen=True, slots=True, repr=False)
class Recording:
    """What was appended to a lane, and its every moment."""

    store: Store
    appends: list[list[Event]]
    moments: list[Moment]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A lane that was opened twice, with frames of both kinds, several segments, and room made in some."""
    store = rb.open(tmp_path_factory.mktemp("recorded") / "s", create=True)
    counts = [1, 9, 2, 3, 12, 1, 8, 1, 1, 1, 1, 5, 2, 10, 1, 1, 1, 1, 1]
    appends = [_append(i, count) for i, count in enumerate(counts)]
    moments: list[Moment] = []
    done = cuts = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flusher, "OFTEN", 2)
        patch.setattr(flusher, "ROOM", 1500)
        for part in (appends[:5], appends[5:]):
            recorder = _record(store, part, done)
            done += len(part)
            cuts += recorder.cuts
            moments += recorder.moments
    assert len(list((store.path / "lanes" / "a").glob("*.wal"))) > 4
    assert len(moments) > 50
    assert cuts
    return Recording(store, appends, moments)


def _record(store: Store, appends: list[list[Event]], done: int) -> Recorder:
    """Append these to the lane, which holds so many appends."""
    folder = store.path / "lanes" / "a"
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder)
    recorder.acknowledged = done

    def count(_: Future[int]) -> None:
        recorder.acknowledged += 1  # in the thread that writes: so between two of its calls

    each_alone = SMALL.model_copy(update={"group_events": 1})
    with LaneWriter(store.path, store.store_id, "a", each_alone, recorder) as writer:
        for i, events in enumerate(appends):
            future = writer.append(events)
            future.add_done_callback(count)
            if i % 4 == 3:  # the others wait while the one before is synced
                future.result(30)
    return recorder


@given(data=st.data())
@settings(max_examples=120)
def test_a_machine_that_stops(
    recording: Recording, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Whatever of what was not flushed is on the disk after a power cut, no acknowledged event is missing."""
    moment = recording.moments[data.draw(st.integers(0, len(recording.moments) - 1), "moment")]
    store = rb.open(_after_the_cut(recording, tmp_path_factory.mktemp("cut") / "s", moment, data.draw))
    _whole_appends_of_a_prefix(_read(store), recording.appends)
    with _writer(store) as writer:
        there = _whole_appends(_read(store), recording.appends)
        assert moment.acknowledged <= there
        new = _append(99, 3)
        first = writer.append(new).result(30)
        assert first == sum(len(events) for events in recording.appends[:there])
    # The chain goes on over the place of the cut.
    state = recover_lane(store.path, "a")
    assert (state.next_seq, state.truncated_bytes) == (first + 3, 0)
    assert _read(store)[-3:] == [e.record.error for e in new]  # type: ignore[union-attr]


def _after_the_cut(
    recording: Recording, folder: Path, moment: Moment, draw: Callable[[Any, str], Any]
) -> Path:
    """A store as the disk may have it when the machine stops at that moment."""
    lane = folder / "lanes" / "a"
    lane.mkdir(parents=True)
    shutil.copy(recording.store.path / "STORE.json", folder)
    for name, file in moment.files.items():
        if not file.named and draw(st.booleans(), f"{name} has no name yet"):
            continue
        (lane / name).write_bytes(_of_both(file.flushed, file.data, name, draw))
    (lane / "WATERMARK").write_bytes(draw(st.sampled_from(moment.marks), "watermark"))
    return folder


def _of_both(old: bytes, new: bytes, name: str, draw: Callable[[Any, str], Any]) -> bytes:
    """What a file may hold of its old bytes and of those that were not flushed."""
    if new == old[: len(new)]:  # it was being cut, if anything
        return new if draw(st.booleans(), f"{name} is cut") else old
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
    kept = draw(st.integers(same, len(new)), f"end of the new bytes of {name}")
    content = new[:kept] + old[kept:]
    longer = len(content) < len(new) and draw(st.booleans(), "the file's length is there, its bytes are not")
    return content + bytes(len(new) - len(content)) if longer else content


def _whole_appends_of_a_prefix(texts: list[str], appends: list[list[Event]]) -> None:
    """A reader before recovery goes by the watermark, which may be an old one; it ends between frames."""
    assert _whole_appends(texts, appends) <= len(appends)


@pytest.mark.parametrize("begun", [b"", b"RBLF" + bytes(300), b"\xff" * 64])
def test_a_segment_that_was_hardly_begun_is_not_read(store: Store, begun: bytes) -> None:
    """Until the lane is recovered, readers pass over a segment beyond the watermark, whatever is in it."""
    with _writer(store) as writer:
        for i in range(12):
            writer.append(_append(i, 2)).result(30)
    lane = store.path / "lanes" / "a"
    numbers = [int(path.stem) for path in lane.glob("*.wal")]
    assert len(numbers) > 1
    (lane / f"{max(numbers) + 1:08d}.wal").write_bytes(begun)
    for start in range(24):
        assert [e.seq for e in store.events(None, {"a": start})] == list(range(start, 24))


# A recovery, or a sealing, that is itself stopped ---------------------------------------------------


class Stop(BaseException):
    """The process is killed here."""


CALLS = ("ftruncate", "fsync", "fdatasync", "unlink", "rename", "pwrite", "open", "mkdir")


def _stops(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any], prepare: Callable[[int], Any] = lambda n: None
) -> Iterator[int]:
    """Run `act` again and again, killed before its n-th call of the system, until it comes through."""
    for stop_at in range(1000):
        prepare(stop_at)
        left = iter(range(stop_at))
        killed = False

        def call(name: str, left: Iterator[int] = left) -> Callable[..., Any]:
            real = getattr(os, name)

            def maybe(*args: Any, **kwargs: Any) -> Any:
                nonlocal killed
                if killed or next(left, None) is None:
                    killed = True  # a dead process does nothing more
                    raise Stop
                return real(*args, **kwargs)

            return maybe

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, call(name))
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with contextlib.suppress(Stop):
                act()
        if not killed:
            return
        yield stop_at
    raise AssertionError("it never came through")


@pytest.fixture
def torn(store: Store) -> Path:
    """Folder of a lane whose second segment ends in half a frame that nobody was told of."""
    for number in (0, 1):
        with _writer(store) as writer:
            for i in range(3):
                writer.append(_append(3 * number + i, 1)).result(30)
    lane = store.path / "lanes" / "a"
    last = lane / "00000002.wal"
    data = last.read_bytes()
    frame = list(scan(memoryview(data), 0, len(data)))[-1]
    (lane / "WATERMARK").write_bytes(Watermark(2, frame.offset, 5).pack())
    last.write_bytes(data[: frame.end - 64])
    return lane


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.more_but("half a frame")
@pytest.mark.parametrize("empty", [False, True], ids=["half a frame", "a segment without a whole frame"])
def test_a_recovery_that_is_stopped(
    store: Store, torn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    """Killed before any of its calls, it leaves a lane that the next recovery brings to the same end."""
    if empty:
        (torn / "00000003.wal").write_bytes(b"RBLF")
        last = torn / "00000002.wal"
        last.write_bytes(last.read_bytes()[: read_watermark(torn).offset])

    def copy(number: int) -> Store:
        return Store(tmp_path / f"copy-{number}", store.store_id)

    def prepare(number: int) -> None:
        shutil.copytree(store.path, copy(number).path)
        current.append(copy(number))

    current: list[Store] = []
    appends = [_append(i, 1) for i in range(5)]
    stops = 0
    for number in _stops(monkeypatch, lambda: _writer(current[-1]).close(), prepare):
        stops += 1
        again = copy(number)
        assert _whole_appends(_read(again), appends) == 5
        with _writer(again) as writer:
            assert writer.recovered.next_seq == 5
            assert writer.append(_append(5, 1)).result(30) == 5
        assert _whole_appends(_read(again), [*appends, _append(5, 1)]) == 6
        assert quarantined(again.path / "lanes" / "a") is None
    assert stops > 8


def test_a_note_of_damage_that_was_cut_short(store: Store, torn: Path) -> None:
    """A quarantine's note that is empty or unreadable still says that there is one."""
    for content in (b"", b"\xff\xfe", b"half a sent"):
        (torn / "QUARANTINED").write_bytes(content)
        assert quarantined(torn) is not None
    _writer(store).close()
    assert quarantined(torn) is None


def test_damage_is_told_though_it_cannot_be_noted(
    store: Store, torn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for the note, the error is the damage, not the missing room."""
    os.truncate(torn / "00000001.wal", 100)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("rollbook.store.wal.files.replace_small", full)
    with pytest.raises(CorruptionError, match="damaged at offset"):
        recover_lane(store.path, "a")
    quarantine(torn, "what was found")
    assert quarantined(torn) is None


def test_a_sealing_that_is_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any of its calls, a unit is there whole or not at all, and the next pass seals."""
    appends = [_append(i, 9) for i in range(3)]
    with _writer(store) as writer:
        for events in appends:
            writer.append(events).result(30)
    folder = store.path / "sealed" / "a"
    stops, whole = 0, 0
    for _ in _stops(monkeypatch, lambda: list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))):
        stops += 1
        units = [f.name for f in folder.glob("[!.]*")]
        assert _whole_appends(_read(store), appends) == 3
        if units:
            assert units == ["00000001-00000003.1"]
            whole += 1
            for path in (store.path / "lanes" / "a").glob("*.wal"):
                path.unlink()
            assert _whole_appends(_read(store), appends) == 3
            break
    assert (stops > 8, whole) == (True, 1)
    assert remove_leftovers(store.path, "a") > 3
    assert [f.name for f in folder.iterdir()] == ["00000001-00000003.1"]
