"""`rollbook store verify`: what is whole is called whole, and any damage is found in its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Event, Store
from rollbook.store.events import TrajectoryOpened, TurnCompleted, TurnFailed, TurnRequested, token_ids
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units, read_manifest, unit_folder, write_manifest
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.verify import Incomplete, incomplete_turns, verify_lane, verify_store
from rollbook.store.wal.files import quarantine, quarantined, read_watermark


@pytest.fixture(scope="module")
def template(
    tmp_path_factory: pytest.TempPathFactory, notes: Callable[..., list[Event]], story: dict[str, list[Event]]
) -> Path:
    """Lane a: units of segments 1-2 (their WAL gone) and 3, then segments 4 and 5; lane b is small."""
    store = rb.open(tmp_path_factory.mktemp("template") / "store", create=True)
    for number, events in enumerate([story["serve"], story["train"], notes(3), notes(4), notes(5)]):
        with store.writer("a") as writer:
            writer.append([replace(e, event_id=f"{number}-{i}") for i, e in enumerate(events)]).result(30)
        if number in (1, 2):
            list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
    remove_sealed_wal(store.path, "a", current_units(store.path, "a")[:1], 0)
    with store.writer("b") as writer:
        writer.append(notes(1)).result(30)
    assert [unit.name for unit in current_units(store.path, "a")] == [
        "00000001-00000002.1",
        "00000003-00000003.1",
    ]
    return store.path


@pytest.fixture
def damaged(template: Path, tmp_path: Path) -> Store:
    """A copy of the template, for damaging."""
    shutil.copytree(template, tmp_path / "copy")
    return rb.open(tmp_path / "copy")


def test_a_whole_store_is_counted(damaged: Store) -> None:
    """Events, units, WAL files and bytes of each lane are those that are there."""
    a, b = verify_store(damaged)
    assert (a.lane, a.events, a.units, a.wal_files, a.fault) == ("a", 38, 2, 3, None)
    assert (b.lane, b.events, b.units, b.wal_files, b.fault) == ("b", 1, 0, 1, None)
    files = [*damaged.path.glob("lanes/a/*.wal"), *damaged.path.glob("sealed/a/*/*.parquet")]
    assert a.bytes == sum(path.stat().st_size for path in files) - _copy_bytes(damaged)


def _copy_bytes(store: Store) -> int:
    """The WAL file of segment 3, which the unit's count leaves out."""
    return (store.path / "lanes" / "a" / "00000003.wal").stat().st_size


def _flip(name: str, place: Callable[[bytes], int]) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        data = bytearray((store / name).read_bytes())
        data[place(bytes(data))] ^= 1
        (store / name).write_bytes(data)

    return damage


def _remove(name: str) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        path = store / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _manifest(change: Callable[[Any], Any], unit: int = 1) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        chosen = current_units(store, "a")[unit]
        write_manifest(unit_folder(store, chosen), change(chosen))

    return damage


def _other_rows(store: Path) -> None:
    """Replace a unit's file by one of the same lane, with a manifest that fits the file but not the lane."""
    first, second = current_units(store, "a")
    shutil.copy(unit_folder(store, first) / "marks.parquet", unit_folder(store, second) / "marks.parquet")
    write_manifest(unit_folder(store, second), replace(second, files=(first.file("marks.parquet"),)))  # type: ignore[arg-type]


UNIT_1, UNIT_2 = "sealed/a/00000001-00000002.1", "sealed/a/00000003-00000003.1"
DAMAGES: dict[str, tuple[Callable[[Path], None], str, str, int | None]] = {
    "byte of a Parquet file": (
        _flip(f"{UNIT_1}/turns.parquet", lambda d: len(d) // 2),
        "turns.parquet",
        "another sha256",
        None,
    ),
    "Parquet file gone": (_remove(f"{UNIT_1}/marks.parquet"), "marks.parquet", "cannot be read", None),
    "manifest gone": (
        _remove(f"{UNIT_1}/UNIT.json"),
        "lanes/a",
        "manifest of a sealed unit is missing",
        None,
    ),
    "first unit gone": (_remove(UNIT_1), "00000001.wal", "missing", 1),
    "chain of a unit": (
        _manifest(lambda u: replace(u, chain_before="00" * 16)),
        "UNIT.json",
        "begins at event 26 with chain 0000",
        None,
    ),
    "segments of a manifest": (
        _manifest(lambda u: replace(u, segments=u.segments[:1]), unit=0),
        "lanes/a",
        "is that of unit a/00000001-00000001.1",
        None,
    ),
    "rows of another unit": (_other_rows, "UNIT.json", "do not hold events 26 to 28 once each", None),
    "byte of a sealed segment's copy": (
        _flip("lanes/a/00000003.wal", lambda d: len(d) - 100),
        "00000003.wal",
        "checksum",
        3,
    ),
    "byte of a segment": (
        _flip("lanes/a/00000004.wal", lambda d: len(d) - 100),
        "00000004.wal",
        "checksum",
        4,
    ),
    "segment gone": (_remove("lanes/a/00000004.wal"), "00000004.wal", "missing", 4),
    "segment of another lane": (
        lambda at: shutil.copy(at / "lanes/b/00000001.wal", at / "lanes/a/00000004.wal") and None,
        "00000004.wal",
        "chain",
        4,
    ),
    "last segment cut short": (
        lambda store: os.truncate(store / "lanes/a/00000005.wal", 1500),
        "00000005.wal",
        "cut short",
        5,
    ),
    "watermark gone": (_remove("lanes/a/WATERMARK"), "lanes/a", "watermark is missing", None),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_in_its_place(damaged: Store, name: str) -> None:
    """The fault names the file, the segment and the reason; the other lane is whole; a note is left."""
    damage, file, reason, segment = DAMAGES[name]
    damage(damaged.path)
    a, b = verify_store(damaged)
    assert b.fault is None
    assert a.fault is not None
    assert file in a.fault.file
    assert reason in a.fault.reason
    assert a.fault.segment == segment
    assert quarantined(damaged.path / "lanes" / "a") == str(a.fault)
    assert quarantined(damaged.path / "lanes" / "b") is None


def test_the_offset_is_that_of_the_first_bad_frame(damaged: Store) -> None:
    """A frame in the middle of a segment is named by its offset."""
    from rollbook.store.wal.frame import scan

    path = damaged.path / "lanes" / "a" / "00000005.wal"
    data = bytearray(path.read_bytes())
    frame = list(scan(memoryview(bytes(data)), 0, len(data)))[1]
    data[frame.offset + 70] ^= 1
    path.write_bytes(data)
    fault = verify_lane(damaged.path, "a").fault
    assert fault is not None
    assert (fault.segment, fault.offset) == (5, frame.offset)


def test_the_note_goes_when_the_lane_is_whole_again(damaged: Store) -> None:
    """Verify takes away a note once the file is restored, and writes one where there was none."""
    folder = damaged.path / "lanes" / "a"
    path = folder / "00000004.wal"
    data = path.read_bytes()
    path.write_bytes(data[:-64])
    assert verify_store(damaged)[0].fault is not None
    assert "00000004.wal" in (quarantined(folder) or "") or "00000005.wal" in (quarantined(folder) or "")
    path.write_bytes(data)
    quarantine(damaged.path / "lanes" / "b", "was damaged")
    assert [lane.fault for lane in verify_store(damaged)] == [None, None]
    assert [quarantined(damaged.path / "lanes" / lane) for lane in "ab"] == [None, None]


def test_what_is_not_acknowledged_is_not_verified(damaged: Store) -> None:
    """Bytes behind the watermark are a writer's business."""
    folder = damaged.path / "lanes" / "a"
    with (folder / "00000005.wal").open("ab") as file:
        file.write(b"half a frame")
    (folder / "00000006.wal").touch()
    assert verify_lane(damaged.path, "a").fault is None
    assert read_watermark(folder).segment == 5


def test_a_dropped_unit_is_no_damage(damaged: Store) -> None:
    """Of a unit that retention dropped only the manifest is left, and it keeps the chain together."""
    unit = current_units(damaged.path, "a")[0]
    folder = unit_folder(damaged.path, unit)
    for path in folder.glob("*.parquet"):
        path.unlink()
    write_manifest(folder, replace(unit, dropped_us=1))
    verified = verify_lane(damaged.path, "a")
    assert (verified.events, verified.units, verified.fault) == (12, 2, None)
    assert read_manifest(folder).dropped_us == 1


def test_the_command_exits_with_1_at_damage(damaged: Store) -> None:
    """Exit code 0 and a table, or 1 and the place of the damage; --json gives the same as values."""
    run = CliRunner().invoke
    arguments = ["store", "verify", "--store", str(damaged.path)]
    result = run(app, arguments)
    assert (result.exit_code, result.stdout.splitlines()[0].split()[:2]) == (0, ["lane", "events"])
    (damaged.path / UNIT_1 / "turns.parquet").write_bytes(b"")
    result = run(app, arguments)
    assert result.exit_code == 1
    assert "turns.parquet: damaged" in result.stdout
    result = run(app, [*arguments, "--json"])
    assert result.exit_code == 1
    report = orjson.loads(result.stdout)
    assert report["incomplete"] == []
    assert [(lane["lane"], lane["whole"]) for lane in report["lanes"]] == [("a", False), ("b", True)]
    assert report["lanes"][0]["fault"]["file"].endswith("turns.parquet")


@pytest.mark.parametrize("sealed", [False, True])
def test_turns_that_lack_what_they_rest_on_are_named(store: Store, sealed: bool) -> None:
    """A completed turn without its request, and a turn without its trajectory's opening; others are not."""

    def asked(trajectory: str, turn: str) -> TurnRequested:
        return turn_requested(trajectory, turn, root_reason="first_turn", context_key="key")

    def done(trajectory: str, turn: str) -> TurnCompleted:
        ids = token_ids([1])
        return turn_completed(
            trajectory, turn, policy=None, prompt_ids=ids, completion_ids=ids, prompt_length=1
        )

    records = [
        *(TrajectoryOpened("t1", "one"), asked("t1", "u1"), done("t1", "u1"), done("t1", "u2")),
        *(asked("t1", "u3"), TurnFailed("t1", "u3", "x"), asked("t2", "u4"), done("t2", "u4")),
    ]
    with store.writer("a") as writer:
        writer.append([Event(record, "run") for record in records]).result(30)
    if sealed:
        list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
    assert list(incomplete_turns(store)) == [
        Incomplete("run", "t1", "u2", "turn.requested"),
        Incomplete("run", "t2", "u4", "trajectory.opened"),
    ]
    result = CliRunner().invoke(app, ["store", "verify", "--store", str(store.path)])
    assert result.exit_code == 1
    assert "turn u2 of trajectory t1 (run run) has no turn.requested" in result.stdout
    printed = CliRunner().invoke(app, ["store", "verify", "--json", "--store", str(store.path)])
    assert [turn["turn_id"] for turn in orjson.loads(printed.stdout)["incomplete"]] == ["u2", "u4"]
