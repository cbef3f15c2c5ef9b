"""`rollbook store repair`: a damaged WAL file goes where a whole unit holds its events, and no other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError
from rollbook.store.events import SegmentRepaired
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units, unit_folder, write_manifest
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.verify import repair_store, verify_store
from rollbook.store.wal.files import quarantined

UNITS = ["00000001-00000001.1", "00000002-00000003.1"]
Files = dict[str, tuple[bytes, int]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, notes: Callable[..., list[Event]]) -> Path:
    """Lane a: unit of segment 1 (its WAL gone), unit of 2 and 3 (theirs there), segment 4 live; lane b."""
    store = rb.open(tmp_path_factory.mktemp("template") / "store", create=True)
    for number in (1, 2, 3, 4):
        with store.writer("a") as writer:
            for event in notes(number + 1):
                writer.append([replace(event, event_id=f"{number}-{event.event_id}")]).result(30)
        if number in (1, 3):
            list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
        if number == 1:
            remove_sealed_wal(store.path, "a", current_units(store.path, "a"), 0)
    with store.writer("b") as writer:
        writer.append(notes(1)).result(30)
    assert [unit.name for unit in current_units(store.path, "a")] == UNITS
    return store.path


@pytest.fixture
def damaged(template: Path, tmp_path: Path) -> Store:
    """A copy of the template, for damaging."""
    return rb.open(shutil.copytree(template, tmp_path / "copy"))


def _wal(store: Store, number: int, lane: str = "a") -> Path:
    return store.path / "lanes" / lane / f"{number:08d}.wal"


def _parquet(store: Store) -> Path:
    return store.path / "sealed" / "a" / UNITS[1] / "marks.parquet"


def _flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def _told(store: Store) -> list[Any]:
    """Everything that lanes a and b say."""
    return [(e.lane, e.seq, e.event_id, e.record) for e in store.events() if e.lane in "ab"]


def _files(store: Store) -> Files:
    """Every file of the log, but for the note of damage and what repair says."""
    paths = [*store.path.glob("lanes/[ab]/*"), *store.path.glob("sealed/*/*/*")]
    return {
        str(path.relative_to(store.path)): (path.read_bytes(), path.stat().st_ino)
        for path in paths
        if path.name not in ("QUARANTINED", "LOCK")
    }


def _repaired(store: Store) -> list[SegmentRepaired]:
    return [e.record for e in store.events() if isinstance(e.record, SegmentRepaired)]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a byte": _flip,
    "a byte of the magic": lambda path: _flip(path, 0),
    "a byte of the first frame's place": lambda path: _flip(path, 24),
    "the last byte": lambda path: _flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 64),
    "empty": lambda path: os.truncate(path, 0),
    "another file": lambda path: path.write_bytes(path.with_name("00000004.wal").read_bytes()),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("number", [2, 3])
def test_the_sealed_copy_is_taken(damaged: Store, template: Path, name: str, number: int) -> None:
    """The damaged file goes, no other changes; every event is as before, and the log says what was done."""
    before, whole = _told(damaged), _files(damaged)
    DAMAGE[name](_wal(damaged, number))
    a, b = verify_store(damaged)
    assert a.fault is not None
    assert (a.fault.segment, a.fault.unit, b.fault) == (number, UNITS[1], None)
    assert quarantined(damaged.path / "lanes" / "a") == str(a.fault)
    lanes = {lane.lane: lane for lane in repair_store(damaged)}
    assert lanes["a"].repaired == (a.fault,)
    assert [(lane.repaired, lane.fault) for lane in lanes.values() if lane.lane != "a"] == [((), None)]
    assert lanes["a"].fault is None
    assert quarantined(damaged.path / "lanes" / "a") is None
    del whole[f"lanes/a/{number:08d}.wal"]
    assert _files(damaged) == whole
    assert _told(damaged) == before
    unit = current_units(damaged.path, "a")[1]
    [segment] = [s for s in unit.segments if s.number == number]
    end = segment.first_seq + segment.events
    repair = SegmentRepaired("a", number, UNITS[1], segment.first_seq, end, a.fault.reason)
    assert _repaired(damaged) == [repair]
    assert all(lane.fault is None for lane in verify_store(damaged))
    assert [lane.repaired for lane in repair_store(damaged)] == [(), (), ()]
    assert _repaired(damaged) == [repair]


def test_readers_meet_the_damage_and_then_do_not(damaged: Store) -> None:
    """Before the repair the WAL file is read, afterwards the unit."""
    _flip(_wal(damaged, 2))
    with pytest.raises(CorruptionError, match=r"00000002\.wal"):
        list(damaged.events())
    repair_store(damaged)
    assert len(_told(damaged)) == 2 + 3 + 4 + 5 + 1


def test_several_files_at_once(damaged: Store) -> None:
    """All of a lane's are found in one pass."""
    before = _told(damaged)
    for number in (2, 3):
        _flip(_wal(damaged, number))
    [a, _] = repair_store(damaged)
    assert [fault.segment for fault in a.repaired] == [2, 3]
    assert [record.segment for record in _repaired(damaged)] == [2, 3]
    assert _told(damaged) == before


def _unsealed(store: Store) -> None:
    _flip(_wal(store, 4))


def _unit(store: Store) -> None:
    _flip(_parquet(store))


def _unit_and_copy(store: Store) -> None:
    _unit(store)
    _flip(_wal(store, 2))


def _chain(store: Store) -> None:
    """The unit is whole in itself, and not of this lane."""
    unit = current_units(store.path, "a")[1]
    write_manifest(unit_folder(store.path, unit), replace(unit, chain_before="00" * 16))
    _flip(_wal(store, 2))


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (_unsealed, "00000004.wal"),
        (_unit, "marks.parquet"),
        (_unit_and_copy, "marks.parquet"),
        (_chain, "UNIT.json"),
    ],
)
def test_what_cannot_be_proved_is_left_as_it_is(
    damaged: Store, damage: Callable[[Store], None], file: str
) -> None:
    """It is named; no file changes, and the log says nothing."""
    damage(damaged)
    before = _files(damaged)
    [a, b] = repair_store(damaged)
    assert a.fault is not None
    assert (Path(a.fault.file).name, a.fault.unit, a.repaired, b.fault) == (file, None, (), None)
    assert _files(damaged) == before
    assert quarantined(damaged.path / "lanes" / "a") == str(a.fault)
    assert damaged.lanes() == ["a", "b"]


def test_what_lies_before_other_damage_is_repaired(damaged: Store) -> None:
    """A segment that is in no unit stays damaged, and is named; the copy before it is repaired."""
    _flip(_wal(damaged, 3))
    _flip(_wal(damaged, 4))
    [a, _] = repair_store(damaged)
    assert a.fault is not None
    assert ([fault.segment for fault in a.repaired], a.fault.segment) == ([3], 4)
    assert not _wal(damaged, 3).exists()
    assert _wal(damaged, 4).exists()


def test_the_lane_that_says_it(damaged: Store) -> None:
    """Lane `upkeep` may be the damaged one."""
    _flip(_wal(damaged, 2))
    repair_store(damaged)
    list(seal_closed(damaged.path, "upkeep", SealSettings(), all_of_it=True))
    _flip(_wal(damaged, 1, "upkeep"))
    lanes = {lane.lane: lane for lane in repair_store(damaged)}
    assert [fault.segment for fault in lanes["upkeep"].repaired] == [1]
    assert [(record.of_lane, record.segment) for record in _repaired(damaged)] == [("a", 2), ("upkeep", 1)]


def test_verify_names_repair_which_says_what_it_did(damaged: Store) -> None:
    """Verify names the command, which says what it did; exit code 1 where something is still damaged."""

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["store", *words, "--store", str(damaged.path)])

    _flip(_wal(damaged, 2))
    result = run("verify")
    assert result.exit_code == 1
    assert "00000002.wal: damaged at offset" in result.stdout
    whole = f"sealed unit {UNITS[1]} holds the same events and is whole: rollbook store repair --store "
    assert f"{whole}{damaged.path}\n" in result.stdout
    fault = orjson.loads(run("verify", "--json").stdout)["lanes"][0]["fault"]
    assert (fault["segment"], fault["unit"]) == (2, UNITS[1])
    result = run("repair")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()[:3]] == [
        ["lane", "repaired", "whole"],
        ["a", "1", "yes"],
        ["b", "0", "yes"],
    ]
    assert f"removed; sealed unit {UNITS[1]} is read instead\n" in result.stdout
    assert run("verify").exit_code == 0
    _unsealed(damaged)
    result = run("repair")
    assert result.exit_code == 1
    assert "00000004.wal: damaged" in result.stdout
    assert "left as it is; restore the file from a copy\n" in result.stdout
    lanes = orjson.loads(run("repair", "--json").stdout)["lanes"]
    assert [(lane["lane"], lane["repaired"], lane["whole"]) for lane in lanes] == [
        ("a", [], False),
        ("b", [], True),
        ("upkeep", [], True),
    ]
