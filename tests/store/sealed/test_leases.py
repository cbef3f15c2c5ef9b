"""Leases: what a reader holds stays, however the reader ends."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.store import Event, Store
from rollbook.store.sealed.leases import lease_units, leased, removing, take_lease
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import MARKS, Unit, current_units, unit_folder
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.compact import merge, remove_superseded


@pytest.fixture
def units(store: Store, notes: Callable[..., list[Event]]) -> list[Unit]:
    """Two sealed units of lane a, of three events each."""
    for start in (0, 3):
        with store.writer("a") as writer:
            writer.append(notes(3, start)).result(30)
        list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
    return current_units(store.path, "a")


def _files(store: Store) -> list[Path]:
    return sorted(path for path in (store.path / "leases").iterdir() if path.name != "LOCK")


def test_a_leased_unit_stays_until_the_lease_is_released(store: Store, units: list[Unit]) -> None:
    """Of two superseded units the leased one keeps its files, and goes at the first call after."""
    with take_lease(store.path, {"a": [units[0].name]}) as lease:
        assert lease.missing == frozenset()
        assert leased(store.path) == {("a", units[0].name)}
        new = merge(store.path, units, SealSettings())
        assert remove_superseded(store.path, "a") == [units[1].name]
        assert read_file(store.path, units[0], MARKS).num_rows == 3
        assert not unit_folder(store.path, units[1]).exists()
    assert leased(store.path) == set()
    assert remove_superseded(store.path, "a") == [units[0].name]
    assert [f.name for f in unit_folder(store.path, new).parent.iterdir()] == [new.name]
    assert remove_superseded(store.path, "a") == []


def test_derived_files_stay_and_go_with_their_unit(store: Store, units: list[Unit]) -> None:
    """What was derived from a leased unit stays too; derived folders of no unit go."""
    for name in (units[0].name, units[1].name, "00000007-00000009.1"):
        (store.path / "derived" / "a" / name).mkdir(parents=True)
    lease = take_lease(store.path, {"a": [units[0].name]})
    new = merge(store.path, units, SealSettings())
    (store.path / "derived" / "a" / new.name).mkdir()
    remove_superseded(store.path, "a")
    there = {folder.name for folder in (store.path / "derived" / "a").iterdir()}
    assert there == {units[0].name, new.name}
    lease.release()
    remove_superseded(store.path, "a")
    assert [folder.name for folder in (store.path / "derived" / "a").iterdir()] == [new.name]


def test_a_lease_ends_when_it_is_collected(store: Store, units: list[Unit]) -> None:
    """Dropping the last reference releases; releasing twice is no error."""
    lease = take_lease(store.path, {"a": [units[0].name]})
    assert len(_files(store)) == 1
    del lease
    gc.collect()
    assert _files(store) == []
    lease = take_lease(store.path, {})
    lease.release()
    lease.release()
    assert _files(store) == []


HOLDER = """
import sys
from pathlib import Path
from rollbook.store.sealed.leases import take_lease
lease = take_lease(Path(sys.argv[1]), {"a": [sys.argv[2]]})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lease_ends_with_its_process(store: Store, units: list[Unit], fork_python: Any) -> None:
    """While another process holds a lease it counts; once that is killed it does not, and its file goes."""
    process = fork_python(HOLDER, store.path, units[1].name)
    assert process.stdout.readline() == "held\n"
    assert leased(store.path) == {("a", units[1].name)}
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert len(_files(store)) == 1
    assert leased(store.path) == set()
    assert _files(store) == []


def test_a_fork_ends_no_lease_of_its_parent(store: Store, units: list[Unit]) -> None:
    """A child that collects its copy of a lease leaves the parent's in force."""
    lease = take_lease(store.path, {"a": [units[0].name]})
    pid = os.fork()
    if pid == 0:
        lease.release()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert leased(store.path) == {("a", units[0].name)}
    lease.release()
    assert leased(store.path) == set()


def test_a_unit_that_went_before_the_lease_is_missing(store: Store, units: list[Unit]) -> None:
    """The lease says which of its units were not there, and listing again finds those that count."""
    new = merge(store.path, units, SealSettings())
    remove_superseded(store.path, "a")
    with take_lease(store.path, {"a": [units[0].name, new.name], "b": ["x"]}) as lease:
        assert lease.missing == {("a", units[0].name), ("b", "x")}
    counted, lease = lease_units(store.path, ["a", "b"])
    assert counted == {"a": [new], "b": []}
    assert leased(store.path) == {("a", new.name)}
    lease.release()


def test_no_lease_is_taken_while_units_are_removed(
    store: Store, units: list[Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking a lease waits for a removal, and an unfinished lease file is removed by it."""
    from rollbook.store.errors import StoreError
    from rollbook.store.sealed import leases

    monkeypatch.setattr(leases, "PATIENCE_S", 0.05)
    take_lease(store.path, {}).release()
    (store.path / "leases" / ".unfinished.lease").touch()
    with removing(store.path) as held:
        assert held == set()
        with pytest.raises(StoreError, match="LOCK has been held"):
            take_lease(store.path, {"a": [units[0].name]})
    assert _files(store) == []
    take_lease(store.path, {"a": [units[0].name]}).release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_may_only_be_read(store: Store, units: list[Unit]) -> None:
    """Where no file can be made the lease is an empty one, and reading goes on."""
    store.path.chmod(0o555)
    try:
        with take_lease(store.path, {"a": [units[0].name]}) as lease:
            assert lease.missing == frozenset()
    finally:
        store.path.chmod(0o755)
