"""kill -9 of the sealer before any of its file operations, and at any time: nothing lost, nothing twice."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.records import turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.sealed.unit import all_units, current_units
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.files import read_watermark

pytestmark = pytest.mark.crashes

SMALL = """
[append]
segment_bytes = 6000
body_bytes = 256
[seal]
keep_wal_bytes = 5000
compact_bytes = 400_000
"""

# Forks a sealer for each line `STORE COUNT SECONDS`: it kills itself before its operation number COUNT on a
# file of the store (0: never), and is killed after SECONDS (0: never). Imports are done once, and no thread
# is started before the fork.
SEALERS = """
import os, signal, sys, time
import duckdb, pyarrow.parquet
from rollbook import store as rb
from rollbook.store.sealed import derived
from rollbook.store.upkeep import sealer

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")

def seal(path, count):
    done = 0
    def hook(name, args):
        nonlocal done
        # What begins with no path of the store is a temporary file, or one that `shutil.rmtree` removes.
        if name in CHANGES and (name == "os.truncate" or os.fsdecode(args[0]).startswith((path, "UNIT"))):
            done += 1
            if done == count:
                os.kill(os.getpid(), signal.SIGKILL)
    if count:
        sys.addaudithook(hook)
    report = sealer.Sealer(rb.open(path)).run_once(5)
    assert report.damage == {}, report

for line in sys.stdin:
    path, count, seconds = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            seal(path, int(count))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    if float(seconds):
        time.sleep(float(seconds))
        os.kill(pid, signal.SIGKILL)  # it may have ended, but has not been waited for
    os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\\n".encode())
"""


def _fill(store: Store, lane: str, count: int) -> None:
    with store.writer(lane) as writer:
        for i in range(count):
            ask: list[Any] = [
                {"role": "user", "content": "x" * 600},
                {"role": "user", "content": f"{lane}{i}"},
            ]
            record = turn_requested("t", f"u{i}", request_id=f"r{i}", root_reason="first", messages=ask)
            writer.append([Event(record, "r")]).result(30)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store where the next pass does everything: seal, adopt, merge, remove units and WAL files."""
    store = rb.open(tmp_path_factory.mktemp("ready") / "store", create=True)
    (store.path / "store.toml").write_text(SMALL.replace("400_000", "0").replace("5000", "5_000_000"))
    for _ in range(3):
        _fill(store, "a", 3)
        Sealer(store).run_once()
    (store.path / "store.toml").write_text(SMALL)
    _fill(store, "a", 10)
    _fill(store, "b", 3)
    # A writer that died in the middle of a frame.
    last = store.path / "lanes" / "b" / f"{read_watermark(store.path / 'lanes' / 'b').segment:08d}.wal"
    with last.open("ab") as file:
        file.write(b"RBLF" + bytes(100))
    return store


@pytest.fixture(scope="module")
def before(ready: Store, plain: Callable[[Event], Any]) -> list[Any]:
    """What the store's events are."""
    return [plain(event) for event in ready.events()]


@pytest.fixture(scope="module")
def sealers(start_python: Callable[..., subprocess.Popen[str]]) -> Iterator[subprocess.Popen[str]]:
    """The process that forks sealers."""
    process = start_python(SEALERS)
    yield process
    assert process.communicate(timeout=30) == ("", "")


def _seal(sealers: subprocess.Popen[str], store: Store, count: int = 0, seconds: float = 0.0) -> int:
    """Exit status of a sealer that is killed as said, if it lives so long."""
    assert sealers.stdin is not None
    assert sealers.stdout is not None
    sealers.stdin.write(f"{store.path} {count} {seconds}\n")
    sealers.stdin.flush()
    return int(sealers.stdout.readline())


def _copy(ready: Store, folder: Path) -> Store:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ready.path, folder)
    return rb.open(folder)


def _is_whole(store: Store, before: list[Any], plain: Callable[[Event], Any]) -> None:
    assert [plain(event) for event in store.events()] == before
    assert [lane.fault for lane in verify_store(store)] == [None, None]


def _is_tidy(store: Store) -> None:
    """Nothing is left of an earlier pass: every folder is that of a unit that counts."""
    for lane in store.lanes():
        names = {unit.name for unit in current_units(store.path, lane)}
        for part in ("sealed", "derived"):
            assert {folder.name for folder in (store.path / part / lane).iterdir()} == names
    assert [f.name for f in (store.path / "leases").iterdir()] == ["LOCK"]


def test_a_sealer_killed_before_any_operation_loses_nothing(
    ready: Store,
    before: list[Any],
    sealers: subprocess.Popen[str],
    plain: Callable[[Event], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Killed before an operation on a file, it leaves a store that reads the same; the next pass is clean."""
    assert {unit.generation for unit in all_units(ready.path, "a")} == {1}
    count = -1
    while True:
        count += 2  # every second one, for the time it takes; the other test finds those in between
        store = _copy(ready, tmp_path / "store")
        status = _seal(sealers, store, count)
        _is_whole(store, before, plain)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if count % 8 == 1:
            assert Sealer(store).run_once().damage == {}
            _is_whole(store, before, plain)
            _is_tidy(store)
    _is_tidy(store)
    assert [unit.generation for unit in current_units(store.path, "a")] == [2]
    assert count > 60


def test_sealers_killed_at_any_time_lose_nothing(
    ready: Store,
    before: list[Any],
    sealers: subprocess.Popen[str],
    plain: Callable[[Event], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """One store, sealers killed after random times, until one gets through."""
    rng = random.Random(3)
    store = _copy(ready, tmp_path / "store")
    killed = 0
    for _ in range(12):
        killed += _seal(sealers, store, seconds=rng.uniform(0.01, 0.25)) == -signal.SIGKILL
        _is_whole(store, before, plain)
    assert _seal(sealers, store) == 0
    _is_whole(store, before, plain)
    _is_tidy(store)
    assert killed > 3
