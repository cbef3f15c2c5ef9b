"""kill -9 of an upload at each step, here or inside a request: all reads the same, a later call finishes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.sealed.unit import all_units, current_units
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.upload import upload_units

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


pytestmark = pytest.mark.crashes

# Forks a sealer for each line `STORE COUNT`: it kills itself before its operation number COUNT on a file of
# the store (0: never). Imports are done once, and no thread is started before the fork.
UPLOADERS = """
import os, signal, sys
import duckdb, pyarrow, pyarrow.parquet
from rollbook import store as rb
from rollbook.store.upkeep import sealer

pyarrow.scalar(0)  # imports pandas, where it is installed

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")

def upload(path, count):
    done = 0
    def hook(name, args):
        nonlocal done
        if name in CHANGES or (name == "open" and isinstance(args[2], int) and args[2] & WRITES):
            if str(args[0]).startswith(path):
                done += 1
                if done == count:
                    os.kill(os.getpid(), signal.SIGKILL)
    if count:
        sys.addaudithook(hook)
    report = sealer.Sealer(rb.open(path)).run_once(5)
    assert report.damage == {}, report

for line in sys.stdin:
    path, count = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            upload(path, int(count))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    os.write(1, f"{pid}\\n".encode())
    os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\\n".encode())
"""
SETTINGS = """
[seal]
keep_wal_bytes = 0
compact_bytes = {}
[remote]
uri = "{}"
endpoint = "{}"
"""


@pytest.fixture
def uploaders(
    storage: ObjectStorage, start_python: Callable[..., subprocess.Popen[str]]
) -> Iterator[subprocess.Popen[str]]:
    """The process that forks uploaders."""
    process = start_python(UPLOADERS)
    yield process
    assert process.communicate(timeout=30) == ("", "")


def _run(uploaders: Any, store: Store, count: int, on_pid: Callable[[int], object] = lambda pid: None) -> int:
    uploaders.stdin.write(f"{store.path} {count}\n")
    uploaders.stdin.flush()
    on_pid(int(uploaders.stdout.readline()))
    return int(uploaders.stdout.readline())


@pytest.fixture
def ready(store: Store, storage: ObjectStorage, notes: Callable[..., list[Event]]) -> Store:
    """A lane with four units in object storage, to be merged, and events that are not sealed yet."""
    (store.path / "store.toml").write_text(SETTINGS.format(0, storage.uri, storage.endpoint))
    for i in range(4):
        with store.writer("a") as writer:
            writer.append(notes(3, 3 * i)).result(30)
        assert Sealer(store).run_once().damage == {}
    with store.writer("a") as writer:
        writer.append(notes(3, 12)).result(30)
    (store.path / "store.toml").write_text(SETTINGS.format(1 << 30, storage.uri, storage.endpoint))
    assert [unit.remote is not None for unit in current_units(store.path, "a")] == [True] * 4
    return store


class _Start:
    """A store and its bucket as they were, to begin from again and again."""

    def __init__(self, ready: Store, storage: Any, folder: Path, plain: Any) -> None:
        self._ready, self._storage, self._folder, self._plain = ready, storage, folder, plain
        self._objects = {key: storage.read(key) for key in storage.objects()}
        self.events = [plain(event) for event in ready.events()]

    def again(self) -> Store:
        self._storage.clear()
        for key, data in self._objects.items():
            self._storage.write(key, data)
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._ready.path, self._folder)
        self._storage.requests.clear()
        return rb.open(self._folder)

    def is_whole(self, store: Store) -> None:
        assert [self._plain(event) for event in store.events()] == self.events

    def finishes(self, store: Store) -> None:
        """Passes of the sealer, and nothing is left: one unit a lane, all of it in object storage only."""
        for _ in range(2):
            assert Sealer(store).run_once().damage == {}
        upload_units(store)
        self.is_whole(store)
        [unit] = all_units(store.path, "a")
        assert unit.remote is not None
        folder = store.path / "sealed" / "a"
        assert [f.name for f in folder.iterdir()] == [unit.name]
        assert [f.name for f in (folder / unit.name).iterdir()] == ["UNIT.json"]
        base = f"some prefix/{store.store_id}"
        files = ["UNIT.json", *(file.name for file in unit.files)]
        expected = [f"{base}/STORE.json", *(f"{base}/sealed/a/{unit.name}/{name}" for name in files)]
        assert sorted(self._storage.objects()) == sorted(expected)


@pytest.fixture
def start(ready: Store, storage: ObjectStorage, tmp_path: Path, plain: Callable[[Event], Any]) -> _Start:
    """Where each killed uploader begins."""
    return _Start(ready, storage, tmp_path / "copy", plain)


def test_killed_before_any_operation_here(start: _Start, uploaders: subprocess.Popen[str]) -> None:
    """For each operation on a file of the store."""
    count = 0
    while True:
        count += 1
        store = start.again()
        status = _run(uploaders, store, count)
        start.is_whole(store)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if count % 3 == 0:
            start.finishes(store)
    start.finishes(store)
    assert count > 30


class _Victim:
    """A process that is killed at a request."""

    def __init__(self, at: int) -> None:
        self._at, self._pid, self._known = at, 0, threading.Event()

    def is_process(self, pid: int) -> None:
        self._pid = pid
        self._known.set()

    def kill(self, number: int) -> None:
        if number == self._at and self._known.wait(60):
            os.kill(self._pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_request(
    start: _Start, uploaders: subprocess.Popen[str], storage: ObjectStorage, when: str
) -> None:
    """Before the server does what a request asks, or after it, with no answer heard; at random requests."""
    store = start.again()
    assert _run(uploaders, store, 0) == 0
    total = len(storage.requests)
    start.finishes(store)
    rng = random.Random(5)
    killed = 0
    for at in sorted(rng.sample(range(1, total + 1), 12)):
        store = start.again()
        victim = _Victim(at)
        setattr(storage, when, victim.kill)
        status = _run(uploaders, store, 0, victim.is_process)
        setattr(storage, when, lambda number: None)
        killed += status == -signal.SIGKILL
        start.is_whole(store)
        start.finishes(store)
    assert killed > 8
