"""The half of a writer that touches the disk: the order of its calls, and what a failure leaves."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollbook.store.errors import WriteFailedError
from rollbook.store.lane.files import Watermark, read_watermark
from rollbook.store.lane.flusher import Flusher, Job, RealDisk


class Listed(RealDisk):
    """Says what was called; `fail` names the call that fails, `whole` whether writes take all."""

    def __init__(self, lane: Path, fail: str = "", short: int = 0) -> None:
        self.calls: list[str] = []
        self._lane, self._fail, self._short = lane, fail, short

    def _call(self, name: str) -> None:
        self.calls.append(f"{name} at {read_watermark(self._lane).next_seq}")
        if name == self._fail:
            raise OSError(errno.ENOSPC, "no room")

    def open(self, path: Path) -> int:
        self._call("open")
        return RealDisk.open(self, path)

    def write(self, fd: int, buffers: list[Any]) -> int:
        self._call("write")
        return RealDisk.write(self, fd, [bytes(buffers[0])[: self._short]] if self._short else buffers)

    def sync(self, fd: int) -> None:
        self._call("sync")
        RealDisk.sync(self, fd)

    def sync_folder(self, folder: Path) -> None:
        self._call("sync_folder")
        RealDisk.sync_folder(self, folder)


def _flush(lane: Path, disk: RealDisk, *jobs: Job, alone: bool = True) -> list[Exception]:
    failures: list[Exception] = []
    flusher = Flusher(lane, Watermark(0, 0, 0), disk, failures.append)
    flusher.start()
    for job in jobs:
        flusher.put(job, alone=alone)
    flusher.close()
    return failures


def _job(data: list[bytes], next_seq: int, segment: int | None = None) -> tuple[Job, Future[int]]:
    future: Future[int] = Future()
    return Job(list(data), next_seq, segment, [(future, next_seq - 1)]), future


def test_the_order_of_calls(tmp_path: Path) -> None:
    """Bytes, then the folder of a new file, then the watermark, and only then the answers."""
    disk = Listed(tmp_path)
    (first, one), (second, two), (nothing, three) = (
        _job([b"head", b"er"], 1, 1),
        _job([b"more"], 2),
        _job([], 2),
    )
    seen: list[int] = []
    one.add_done_callback(lambda _: seen.append(read_watermark(tmp_path).next_seq))
    assert _flush(tmp_path, disk, first, second, nothing) == []
    assert disk.calls == [
        *("open at 0", "write at 0", "sync at 0", "sync_folder at 0"),
        *("write at 1", "sync at 1"),
    ]
    assert seen == [1]
    assert [f.result(0) for f in (one, two, three)] == [0, 1, 1]
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
    """Its syncs wait until they are let go on."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.syncing = threading.Event()
        self.syncs: list[tuple[str, int]] = []

    def sync(self, fd: int) -> None:
        self.syncing.set()
        assert self.go_on.acquire(timeout=30)
        self.syncs.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, os.fstat(fd).st_size))
        RealDisk.sync(self, fd)


def test_what_is_written_during_a_sync_shares_the_next(tmp_path: Path) -> None:
    """The next bytes are written while the first are synced, and nothing is acknowledged before its sync."""
    disk = Slow()
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    jobs = [_job([b"header"], 1, 1), _job([b"two"], 2), _job([b"three"], 3)]
    flusher.put(jobs[0][0])
    assert disk.syncing.wait(30)
    flusher.put(jobs[1][0])
    assert (tmp_path / "00000001.wal").read_bytes() == b"headertwo"
    waiting = threading.Thread(target=flusher.put, args=(jobs[2][0],))
    waiting.start()  # has to wait: two jobs are ahead of it
    waiting.join(0.05)
    assert waiting.is_alive()
    assert read_watermark(tmp_path) == Watermark(0, 0, 0)
    assert not any(future.done() for _, future in jobs)
    for _ in range(3):
        disk.go_on.release()
    waiting.join(30)
    flusher.close()
    assert [future.result(30) for _, future in jobs] == [0, 1, 2]
    assert read_watermark(tmp_path) == Watermark(1, 14, 3)
    assert 2 <= len(disk.syncs) <= 3


def test_a_segment_is_synced_before_the_next_is_acknowledged(tmp_path: Path) -> None:
    """Each file that was written to has a sync of its own, the older one first."""
    disk = Slow()
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, lambda _: None)
    flusher.start()
    jobs = [_job([b"header"], 1, 1), _job([b"head"], 1, 2)]
    for job, _ in jobs:
        flusher.put(job)
    for _ in range(3):
        disk.go_on.release()
    flusher.close()
    assert [name for name, _ in disk.syncs] == ["00000001.wal", "00000002.wal"]
    assert read_watermark(tmp_path) == Watermark(2, 4, 1)
    assert [future.result(0) for _, future in jobs] == [0, 0]


@pytest.mark.parametrize("alone", [True, False])
def test_a_failed_sync_fails_what_was_written_after_it(tmp_path: Path, alone: bool) -> None:
    """Bytes that were written while a sync failed are cut off too, in whichever thread it ran."""

    class Fails(Slow):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            raise OSError(errno.EIO, "gone")

    disk = Fails()
    failures: list[Exception] = []
    flusher = Flusher(tmp_path, Watermark(0, 0, 0), disk, failures.append)
    flusher.start()
    jobs = [_job([b"header"], 1, 1), _job([b"two"], 2), _job([b"three"], 3)]
    if alone:
        disk.go_on.release()
    for job, _ in jobs[:2]:
        flusher.put(job, alone=alone)
    disk.go_on.release()
    flusher.put(jobs[2][0], alone=alone)
    flusher.close()
    assert len(disk.syncs) == len(failures) == 1
    assert all(future.exception(0) is failures[0] for _, future in jobs)
    assert (tmp_path / "00000001.wal").read_bytes() == b""
    assert read_watermark(tmp_path) == Watermark(0, 0, 0)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("call", ["open", "write", "sync", "sync_folder"])
def test_a_failure_ends_it(tmp_path: Path, call: str, alone: bool) -> None:
    """The failed job and all behind it fail, no disk call follows, and none of its bytes stay."""
    disk = Listed(tmp_path, fail=call)
    (first, one), (second, two), (nothing, three) = _job([b"header"], 1, 7), _job([b"x"], 2), _job([], 2)
    failures = _flush(tmp_path, disk, first, second, nothing, alone=alone)
    assert len(failures) == 1
    for future in (one, two, three):
        with pytest.raises(
            WriteFailedError, match=r"after offset 0 of segment 0.*no room.*restart"
        ) as caught:
            future.result(0)
        assert caught.value is failures[0]
    assert disk.calls.count(f"{call} at 0") == 1
    if alone or call in ("open", "write"):  # else a write may have been on its way
        assert disk.calls[-1] == f"{call} at 0"
    assert read_watermark(tmp_path) == Watermark(0, 0, 0)
    left = [path.read_bytes() for path in tmp_path.glob("*.wal")]
    assert left == ([] if call == "open" else [b""])


def test_what_was_durable_before_a_failure_stays(tmp_path: Path) -> None:
    """Only the failed job's bytes are cut off."""

    class FailsLater(Listed):
        def sync(self, fd: int) -> None:
            self._fail = "sync" if len(self.calls) > 4 else ""
            super().sync(fd)

    (first, one), (second, two) = _job([b"header"], 1, 1), _job([b"lost"], 2)
    failures = _flush(tmp_path, FailsLater(tmp_path), first, second)
    assert one.result(0) == 0
    assert isinstance(two.exception(0), WriteFailedError)
    assert "after offset 6 of segment 1" in str(failures[0])
    assert (tmp_path / "00000001.wal").read_bytes() == b"header"
    assert read_watermark(tmp_path) == Watermark(1, 6, 1)
