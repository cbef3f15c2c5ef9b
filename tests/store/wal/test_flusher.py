"""The half of a writer that touches the disk: the order of its calls, and what a failure leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollbook.store.errors import WriteFailedError
from rollbook.store.wal import flusher as flusher_module
from rollbook.store.wal.files import Watermark, read_watermark
from rollbook.store.wal.flusher import AHEAD, OFTEN, ROOM, SMALL, Flusher, Job, RealDisk


class Listed(RealDisk):
    """Says what was called once it began; `fail` names the call that fails, `short` what a write takes."""

    def __init__(self, lane: Path, fail: str = "", short: int = 0) -> None:
        self.calls: list[str] = []
        self.begun = False
        self._lane, self._fail, self._short = lane, fail, short

    def _call(self, name: str) -> None:
        if not self.begun:
            return
        self.calls.append(f"{name} at {read_watermark(self._lane).next_seq}")
        if name == self._fail:
            raise OSError(errno.ENOSPC, "no room")

    def open(self, path: Path) -> int:
        self._call("open")
        return RealDisk.open(self, path)

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        self._call("write")
        some = [bytes(buffers[0])[: self._short]] if self._short else buffers
        return RealDisk.write(self, fd, some, offset)

    def sync(self, fd: int) -> None:
        self._call("sync")
        RealDisk.sync(self, fd)

    def cut(self, fd: int, size: int) -> None:
        self._call("cut")
        RealDisk.cut(self, fd, size)

    def sync_folder(self, fd: int) -> None:
        self._call("sync_folder")
        RealDisk.sync_folder(self, fd)

    def mark(self, fd: int, watermark: bytes) -> None:
        self._call("mark")
        RealDisk.mark(self, fd, watermark)


def _flush(lane: Path, disk: RealDisk, *jobs: Job, alone: bool = False) -> list[Exception]:
    failures: list[Exception] = []
    flusher = Flusher(lane, Watermark(0, 0, 0), disk, failures.append)
    flusher.start()
    if isinstance(disk, Listed):
        disk.begun = True
    for job in jobs:
        flusher.put(job, alone=alone)
    flusher.close()
    return failures


def _job(data: list[bytes], next_seq: int, segment: int | None = None) -> tuple[Job, Future[int]]:
    future: Future[int] = Future()
    return Job(list(data), next_seq, segment, [(future, next_seq - 1)]), future


@pytest.mark.parametrize("alone", [False, True])
def test_the_order_of_calls(tmp_path: Path, alone: bool) -> None:
    """Bytes, then the folder of a new file, then the watermark, and only then the answers."""
    disk = Listed(tmp_path)
    (first, first_done), (second, second_done), (nothing, third_done) = (
        _job([b"head", b"er"], 1, 1),
        _job([b"more"], 2),
        _job([], 2),
    )
    seen: list[int] = []
    first_done.add_done_callback(lambda _: seen.append(read_watermark(tmp_path).next_seq))
    assert _flush(tmp_path, disk, first, second, nothing, alone=alone) == []
    assert disk.calls == [
        *("open at 0", "write at 0", "sync at 0", "sync_folder at 0", "mark at 0"),
        *("write at 1", "sync at 1", "mark at 1"),
    ]
    assert seen == [1]
    assert [f.result(0) for f in (first_done, second_done, third_done)] == [0, 1, 1]
    assert (tmp_path / "00000001.wal").read_bytes() == b"headermore"
    assert read_watermark(tmp_path) == Watermark(1, 10, 2)


@pytest.mark.parametrize("short", [1, 3])
def test_short_writes_are_gone_on_with(tmp_path: Path, short: int) -> None:
    """However few bytes a write takes, all are written, in order, before the one flush."""
    disk = Listed(tmp_path, short=short)
    job, future = _job([b"abcde", b"", b"fgh"], 1, 1)
    assert _flush(tmp_path, disk, job) == []
    assert future.result(0) == 0
    assert (tmp_path / "00000001.wal").read_bytes() == b"abcdefgh"
    assert [call for call in disk.calls if call.startswith("sync ")] == ["sync at 0"]


class Slow(RealDisk):
    """Its syncs of segments wait until they are let go on, and note their thread and how long the file is."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.syncing = threading.Event()
        self.syncs: list[tuple[str, int]] = []

    def sync(self, fd: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
            return
        self.syncing.set()
        assert self.go_on.acquire(timeout=30)
        self.syncs.append((threading.current_thread().name, os.fstat(fd).st_size))
        RealDisk.sync(self, fd)


def test_one_frame_is_on_its_way_at_a_time(tmp_path: Path) -> None:
    """While one is synced the next ones wait, unwritten; beyond `AHEAD` of them, whoever brings one does."""
    disk = Slow()
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    jobs = [_job([b"header"], 1, 1), *(_job([b"x"], 2 + i) for i in range(AHEAD + 1))]
    flusher.put(jobs[0][0])
    assert disk.syncing.wait(60)
    for job, _ in jobs[1 : 1 + AHEAD]:
        flusher.put(job, alone=True)  # it is not: another one is being flushed
    last = threading.Thread(target=flusher.put, args=(jobs[-1][0],))
    last.start()
    last.join(0.05)
    assert last.is_alive()
    assert (tmp_path / "00000001.wal").read_bytes() == b"header"
    assert not any(future.done() for _, future in jobs)
    for _ in jobs:
        disk.go_on.release()
    last.join(30)
    flusher.close()
    assert disk.syncs == [(f"flush-{tmp_path.name}", 6 + i) for i in range(len(jobs))]
    assert [future.result(0) for _, future in jobs] == list(range(len(jobs)))


def test_whoever_is_alone_flushes_it_himself(tmp_path: Path) -> None:
    """The other thread would do it no sooner, so it is not woken; when the call returns all is durable."""
    disk = Slow()
    for _ in range(2):
        disk.go_on.release()
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    for (job, future), end in ((_job([b"header"], 1, 1), 6), (_job([b"more"], 2), 10)):
        flusher.put(job, alone=True)
        assert future.done()
        assert read_watermark(tmp_path) == Watermark(1, end, job.next_seq)
    assert disk.syncs == [(threading.current_thread().name, end) for end in (6, 10)]
    flusher.close()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("call", ["open", "write", "sync", "sync_folder", "mark"])
def test_after_a_failure_the_flusher_calls_the_disk_no_more(tmp_path: Path, call: str, alone: bool) -> None:
    """The failed job and all behind it fail, no disk call follows, and none of its bytes stay."""
    disk = Listed(tmp_path, fail=call)
    (first, first_done), (second, second_done), (nothing, third_done) = (
        _job([b"header"], 1, 7),
        _job([b"x"], 2),
        _job([], 2),
    )
    failures = _flush(tmp_path, disk, first, second, nothing, alone=alone)
    assert len(failures) == 1
    for future in (first_done, second_done, third_done):
        with pytest.raises(
            WriteFailedError, match=r"after offset 0 of segment 0.*no room.*goes on by itself"
        ) as caught:
            future.result(0)
        assert caught.value is failures[0]
    assert disk.calls[-1] == f"{call} at 0"
    assert len(disk.calls) == 1 + ["open", "write", "sync", "sync_folder", "mark"].index(call)
    assert read_watermark(tmp_path) == Watermark(0, 0, 0)
    left = [path.read_bytes() for path in tmp_path.glob("*.wal")]
    assert left == ([] if call == "open" else [b""])


def test_what_was_durable_before_a_failure_stays(tmp_path: Path) -> None:
    """Only the failed job's bytes are cut off."""

    class FailsLater(Listed):
        def sync(self, fd: int) -> None:
            self._fail = "sync" if len(self.calls) > 5 else ""
            super().sync(fd)

    (first, first_done), (second, second_done) = _job([b"header"], 1, 1), _job([b"lost"], 2)
    failures = _flush(tmp_path, FailsLater(tmp_path), first, second)
    assert first_done.result(0) == 0
    assert isinstance(second_done.exception(0), WriteFailedError)
    assert "after offset 6 of segment 1" in str(failures[0])
    assert (tmp_path / "00000001.wal").read_bytes() == b"header"
    assert read_watermark(tmp_path) == Watermark(1, 6, 1)


def _small_commits(disk: RealDisk, lane: Path, count: int) -> Flusher:
    """A flusher that has written a header and so many frames of three bytes."""
    flusher = Flusher(lane, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    if isinstance(disk, Listed):
        disk.begun = True
    flusher.put(_job([b"header"], 0, 1)[0], alone=True)
    for i in range(count):
        flusher.put(_job([b"abc"], i + 1)[0], alone=True)
    return flusher


def test_room_is_made_for_many_small_commits(tmp_path: Path) -> None:
    """After some of them zeros are written ahead, which later ones overwrite; closing cuts off the rest."""
    flusher = _small_commits(RealDisk(), tmp_path, OFTEN - 1)
    wal = tmp_path / "00000001.wal"
    before = 6 + 3 * (OFTEN - 1)
    assert wal.stat().st_size == before
    for i in range(2):
        flusher.put(_job([b"def"], OFTEN + i)[0], alone=True)
    assert wal.read_bytes() == b"header" + b"abc" * (OFTEN - 1) + b"defdef" + bytes(ROOM - 6)
    assert read_watermark(tmp_path) == Watermark(1, before + 6, OFTEN + 1)
    flusher.put(_job([b"x" * (ROOM - 6)], OFTEN + 2)[0], alone=True)  # to its last byte
    assert wal.stat().st_size == before + ROOM
    flusher.put(_job([b"y" * (SMALL + 1)], OFTEN + 3)[0], alone=True)  # a large one only makes it longer
    assert wal.stat().st_size == before + ROOM + SMALL + 1
    flusher.close()
    assert wal.stat().st_size == before + ROOM + SMALL + 1


def test_room_is_cut_off_before_the_next_segment_begins(tmp_path: Path) -> None:
    """And nothing of it is left when the lane is closed."""
    disk = Listed(tmp_path)
    flusher = _small_commits(disk, tmp_path, OFTEN + 3)
    disk.calls.clear()
    flusher.put(_job([b"next"], OFTEN + 3, 2)[0], alone=True)
    assert [call.split()[0] for call in disk.calls] == ["cut", "open", "write", "sync", "sync_folder", "mark"]
    assert (tmp_path / "00000001.wal").read_bytes() == b"header" + b"abc" * (OFTEN + 3)
    flusher.close()
    assert (tmp_path / "00000002.wal").read_bytes() == b"next"
    assert "cut" not in disk.calls[-1]  # there was no room in it


@pytest.mark.parametrize("next_call", ["close", "roll"])
def test_room_that_cannot_be_cut_off(tmp_path: Path, next_call: str) -> None:
    """On closing, recovery will; before a roll the lane stops, for its next segment must not begin."""
    disk = Listed(tmp_path, fail="cut")
    flusher = _small_commits(disk, tmp_path, OFTEN + 3)
    job, future = _job([b"next"], OFTEN + 3, 2)
    if next_call == "roll":
        flusher.put(job, alone=True)
        assert isinstance(future.exception(0), WriteFailedError)
        assert not (tmp_path / "00000002.wal").exists()
    flusher.close()
    data = b"header" + b"abc" * (OFTEN + 3)
    assert (tmp_path / "00000001.wal").read_bytes().rstrip(bytes(1)) == data
    assert read_watermark(tmp_path) == Watermark(1, len(data), OFTEN + 3)


def test_without_room_it_goes_on(tmp_path: Path) -> None:
    """A disk that is too full for zeros may not be for the events."""

    class NoRoom(RealDisk):
        def write(self, fd: int, buffers: list[Any], offset: int) -> int:
            if len(buffers[0]) == ROOM:
                raise OSError(errno.ENOSPC, "no room")
            return RealDisk.write(self, fd, buffers, offset)

    flusher = _small_commits(NoRoom(), tmp_path, OFTEN + 3)
    job, future = _job([b"end"], OFTEN + 4)
    flusher.put(job, alone=True)
    assert future.result(0) == OFTEN + 3
    flusher.close()
    assert (tmp_path / "00000001.wal").read_bytes() == b"header" + b"abc" * (OFTEN + 3) + b"end"


def test_room_that_was_made_in_part_is_cut_off_too(tmp_path: Path) -> None:
    """Zeros that a failed write left are no less in the way of the next segment."""

    class HalfTheRoom(RealDisk):
        def write(self, fd: int, buffers: list[Any], offset: int) -> int:
            written = RealDisk.write(self, fd, [bytes(buffers[0])[:4096]], offset)
            if len(buffers[0]) == ROOM:
                raise OSError(errno.EIO, "gone")
            return written

    flusher = _small_commits(HalfTheRoom(), tmp_path, OFTEN + 3)
    job, future = _job([b"next"], OFTEN + 3, 2)
    flusher.put(job, alone=True)
    assert future.result(0) == OFTEN + 2
    flusher.close()
    assert (tmp_path / "00000001.wal").read_bytes() == b"header" + b"abc" * (OFTEN + 3)


# What is short --------------------------------------------------------------------------------------


class Scarce(Listed):
    """A call that is refused so many times, for want of a descriptor or of memory."""

    def __init__(self, lane: Path, fail: str, code: int, times: int) -> None:
        super().__init__(lane, fail)
        self.code, self.times = code, times

    def _call(self, name: str) -> None:
        fail, self._fail = self._fail, ""
        super()._call(name)
        self._fail = fail
        if name == fail and self.begun and self.times:
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["open", "write"])
def test_what_is_short_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Nothing fails and nothing is written twice: the job waits, and says so, until there is some again."""
    reasons: list[str | None] = []
    disk = Scarce(tmp_path, call, code, 4)
    monkeypatch.setattr(time, "sleep", lambda _: reasons.append(flusher.waiting))
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    disk.begun = True
    (first, first_done), (second, second_done) = _job([b"header"], 1, 1), _job([b"more"], 2)
    for job in (first, second):
        flusher.put(job, alone=True)
    assert [first_done.result(0), second_done.result(0)] == [0, 1]
    assert len(reasons) == 3  # the first time the spare descriptor was given for it
    assert all(os.strerror(code) in str(text) for text in reasons)
    assert flusher.waiting is None
    flusher.close()
    assert (tmp_path / "00000001.wal").read_bytes() == b"headermore"
    assert [c.split()[0] for c in disk.calls if c.startswith(call)] == [call] * (5 + (call == "write"))


def test_what_stays_short_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends wait so long and no longer; a flush is not asked for twice even then."""
    monkeypatch.setattr(flusher_module, "PATIENCE_S", 0.05)
    for call, tries in (("open", 3), ("sync", 1)):
        folder = tmp_path / call
        folder.mkdir()
        disk = Scarce(folder, call, errno.ENOMEM, 1000)
        job, future = _job([b"header"], 1, 1)
        failures = _flush(folder, disk, job)
        assert isinstance(future.exception(0), WriteFailedError)
        assert os.strerror(errno.ENOMEM) in str(failures[0])
        attempts = [c for c in disk.calls if c.split()[0] == call]
        assert len(attempts) >= tries if call == "open" else len(attempts) == 1


def test_the_spare_descriptor_is_for_the_next_segment(tmp_path: Path) -> None:
    """Where somebody takes every free descriptor just before it is opened, it begins all the same."""

    class Greedy(RealDisk):
        taken: list[int] = []  # noqa: RUF012

        def open(self, path: Path) -> int:
            if not self.taken:
                _take_all(self.taken)
            return RealDisk.open(self, path)

    flusher = Flusher(tmp_path, Watermark(0, 0, 0), Greedy(), lambda _: None)
    flusher.start()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limit[1]))
    job, future = _job([b"header"], 1, 1)
    try:
        flusher.put(job, alone=True)
        assert future.result(0) == 0
        assert len(Greedy.taken) > 10
    finally:
        for fd in Greedy.taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    flusher.close()


def _take_all(taken: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
