"""Retention: what may go does, in whole trajectories and prefixes of lanes; what anything needs stays."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.catalog import Catalog
from rollbook.store.errors import LaneLockedError, UpkeepError
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.ids import now_us
from rollbook.store.sealed.leases import lease_units
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units, unit_folder, unsealed_start
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.retain import RetainReport, retain
from rollbook.store.upkeep.retention_policy import KeepAge, KeepBytes, KeepVersions, parse_keep
from rollbook.store.upkeep.retire import RetireReport, parse_steps, retire_steps
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.files import lane_folder, segment_numbers

DAY = 86_400_000_000
ALL = "0s"
"""Keeps nothing by itself."""


def turns(name: str, version: int | None = 0, *, finished: bool = True) -> list[Any]:
    """A trajectory of one turn."""
    ids = np.array([1, 2], np.int32)
    spans = () if version is None else (kinds.VersionSpan("actor", version, 0, 2),)
    return [
        kinds.TrajectoryOpened(name, name, "g", "task", "train"),
        turn_requested(name, f"{name}.0", root_reason="first_turn"),
        turn_completed(
            name,
            f"{name}.0",
            policy=None if version is None else "actor",
            policy_version=version,
            prompt_ids=ids,
            completion_ids=ids,
            version_spans=spans,
            prompt_length=2,
            prompt_sha256=prompt_sha256(ids),
            reply={"content": f"of {name}"},
        ),
        *([kinds.TrajectoryFinished(name)] if finished else []),
    ]


def planned(step: int, version: int, names: Sequence[str], attempt: int = 1, phase: str = "p") -> Any:
    """The manifest of a step that trains these trajectories."""
    refs = [{"trajectory_id": name, "turn_id": f"{name}.0"} for name in names]
    return step_planned(
        step,
        attempt=attempt,
        policy_version=version,
        phase=phase,
        cut="serve=0",
        recipe_digest="rd",
        samples=refs,
        partition=[[[0]]],
        algorithm={"name": "grpo"},
        seed=7,
    )


def committed(step: int, version: int, attempt: int = 1) -> Any:
    """That the step committed and made `version`."""
    return kinds.StepCommitted(step, attempt, "actor", version, {}, {})


def checkpoint(version: int, phase: str | None = "p", optimizer: str | None = "o") -> Any:
    """A checkpoint of a version."""
    return kinds.CheckpointWritten("actor", version, f"checkpoints/{version}", "w", optimizer, phase, 1)


def add_unit(log: Store, lane: str, records: Sequence[Any], *, days_old: float = 10.0, run: str = "r") -> str:
    """Append records to a segment of their own, and seal it as a unit of its own; the unit's name."""
    time_us = now_us() - round(days_old * DAY)
    with log.writer(lane) as writer:
        writer.append([Event(record, run, time_us=time_us) for record in records]).result(30)
    with log.writer(lane):
        pass  # the segment before is closed
    [unit] = seal_closed(log.path, lane, SealSettings())
    return f"{lane}/{unit.name}"


def dropped(report: RetainReport) -> list[str]:
    """The units that went, or would go."""
    return [f"{u.lane}/{u.unit}" for u in report.units if u.dropped]


def reasons(report: RetainReport, unit: str) -> str:
    """Why a unit stays."""
    [verdict] = [u for u in report.units if f"{u.lane}/{u.unit}" == unit]
    assert not verdict.dropped
    return "; ".join(verdict.why_kept)


# How much to keep ---------------------------------------------------------------------------------


def test_what_a_spec_says() -> None:
    """Ages, sizes and versions are read; anything else is refused with the grammar."""
    assert parse_keep("7d") == KeepAge("7d", 7 * DAY)
    assert parse_keep("1.5h") == KeepAge("1.5h", 5_400_000_000)
    assert parse_keep("500GiB") == KeepBytes("500GiB", 500 << 30)
    assert parse_keep("2TB") == KeepBytes("2TB", 2 * 10**12)
    assert parse_keep("versions:20") == KeepVersions("versions:20", 20)
    for text in ("", "7", "7 d", "-1d", "7D", "500gib", "versions:", "versions:-1", "d7", "1e3s"):
        with pytest.raises(UpkeepError, match=r"write an age .*7d.*500GiB.*versions:20"):
            parse_keep(text)


def test_units_older_than_an_age_go(store: Store) -> None:
    """A unit goes when its newest event is older; the files go with it and its manifest stays."""
    old = add_unit(store, "serve", turns("a"), days_old=8)
    young = add_unit(store, "serve", turns("b"), days_old=6)
    report = retain(store, "7d")
    assert dropped(report) == [old]
    assert "--keep 7d: its newest event is younger" in reasons(report, young)
    gone, stays = current_units(store.path, "serve")
    assert gone.dropped_us is not None
    assert [f.name for f in unit_folder(store.path, gone).iterdir()] == ["UNIT.json"]
    assert not {s.number for s in gone.segments} & set(segment_numbers(lane_folder(store.path, "serve")))
    assert stays.dropped_us is None
    [event] = [e for e in store.events() if isinstance(e.record, kinds.SegmentDropped)]
    assert event.lane == "upkeep"
    assert event.record == kinds.SegmentDropped("serve", gone.first, gone.last, 0, 4, "keep 7d")
    assert dropped(retain(store, "7d")) == []
    with contextlib.closing(Catalog.of(store.path)) as catalog:
        units = catalog.rows()["units"]
    assert [(u["name"], u["dropped_us"]) for u in units if u["lane"] == "serve"] == [
        (gone.name, gone.dropped_us),
        (stays.name, None),
    ]


def test_the_oldest_units_go_until_the_rest_fits(store: Store) -> None:
    """The oldest units of all lanes go until the rest fits; the age of a lane's unit never falls."""
    first = add_unit(store, "one", turns("a"), days_old=9)
    second = add_unit(store, "two", turns("b"), days_old=8)
    late = add_unit(store, "one", turns("c"), days_old=1)
    sizes = {f"{u.lane}/{u.unit}": u.bytes for u in retain(store, "1TiB", dry_run=True).units}
    open_bytes = sum(f.stat().st_size for f in store.path.glob("lanes/*/*.wal")) - sum(
        f.stat().st_size
        for u in [*current_units(store.path, "one"), *current_units(store.path, "two")]
        for s in u.segments
        for f in [lane_folder(store.path, u.lane) / f"{s.number:08d}.wal"]
    )
    total = sum(sizes.values())
    assert open_bytes >= 0
    assert dropped(retain(store, f"{total}B", dry_run=True)) == []
    assert dropped(retain(store, f"{total - 1}B", dry_run=True)) == [first]
    assert dropped(retain(store, f"{sizes[late]}B", dry_run=True)) == [first, second]
    assert dropped(retain(store, "0B", dry_run=True)) == [first, late, second]


def test_units_go_after_so_many_newer_versions(store: Store) -> None:
    """A unit goes when each policy that sampled in it has published N versions more; teachers' turns stay."""
    old = add_unit(store, "serve", turns("a", 3))
    recent = add_unit(store, "serve", turns("b", 5))
    teacher = add_unit(store, "teach", turns("c", None))
    assert "has published no version of policy 'actor'" in reasons(
        retain(store, "versions:4", dry_run=True), old
    )
    add_unit(store, "train", [kinds.PolicyPublished("actor", 8, 7, "p", "w")])
    report = retain(store, "versions:4")
    assert dropped(report) == [old]
    assert "tokens of version 5 of 8 of 'actor'" in reasons(report, recent)
    assert "turns without a policy version" in reasons(report, teacher)


# What stays ---------------------------------------------------------------------------------------


def test_trajectories_go_whole_or_not_at_all(store: Store) -> None:
    """One that is open, or has a reward in what is kept, keeps its unit and those behind it in the lane."""
    first = add_unit(store, "serve", turns("done"))
    split = add_unit(store, "serve", [*turns("rewarded"), *turns("alone")])
    behind = add_unit(store, "serve", turns("later"))
    open_ = add_unit(store, "other", turns("open", finished=False))
    reward = add_unit(store, "judge", [kinds.RewardAssigned("rewarded", None, 1.0, "judge")], days_old=1)
    report = retain(store, "7d", dry_run=True)
    assert dropped(report) == [first]
    assert f"trajectory rewarded has events in {reward}" in reasons(report, split)
    assert f"{split} before it stays" in reasons(report, behind)
    assert "trajectory open is not finished" in reasons(report, open_)
    assert dropped(retain(store, "12h")) == [reward, first, split, behind]
    assert set(store.trajectories()) == {"open"}


def test_an_event_that_is_not_sealed_yet_counts(store: Store) -> None:
    """A late reward in an open segment keeps its trajectory."""
    unit = add_unit(store, "serve", turns("a"))
    with store.writer("judge") as writer:
        writer.append([Event(kinds.RewardAssigned("a", None, 1.0, "judge"), "r")]).result(30)
    assert "has events in the unsealed events of lane judge" in reasons(retain(store, ALL), unit)


def test_steps_that_can_be_replayed_keep_their_samples(store: Store) -> None:
    """A step's samples stay until it is retired, and its manifest until the last step is."""
    first = add_unit(store, "serve", turns("a"))
    second = add_unit(store, "serve", turns("b"))
    unused = add_unit(store, "more", turns("c"))
    training = [checkpoint(0, None, None), planned(0, 0, ["a"]), committed(0, 1), checkpoint(1)]
    training += [planned(1, 1, ["b"]), committed(1, 2), checkpoint(2)]
    train = add_unit(store, "train", training)
    report = retain(store, ALL)
    assert dropped(report) == [unused]
    assert "step 0 of policy 'actor' in run 'r' needs trajectory a" in reasons(report, first)
    assert "step 1 of policy 'actor'" in reasons(report, second)
    assert "the training of 'actor' in run 'r', which is not retired" in reasons(report, train)
    assert retire_steps(store, "r", "actor", "space", steps=(0, 0)).steps == (0,)
    assert dropped(retain(store, ALL)) == [first]
    late = retire_steps(store, "r", "actor", "space", before_version=2)
    assert late == RetireReport("r", "actor", (1,), 1)
    assert dropped(retain(store, ALL)) == [second, train]


def test_a_training_goes_whole_or_not_at_all(store: Store) -> None:
    """Its versions stay as long as its steps; and when each is retired, all stays while one event does."""
    first = add_unit(store, "train", [checkpoint(0), kinds.PolicyPublished("actor", 0, None, "p", "w")])
    early = add_unit(store, "train", [planned(0, 0, [])])
    late = add_unit(store, "train", [committed(0, 1)], days_old=1)
    assert "which is not retired" in reasons(retain(store, ALL), first)
    retire_steps(store, "r", "actor", "space", steps=(0, 0))
    report = retain(store, "7d")
    assert f"the training of 'actor' in run 'r' has events in {late}" in reasons(report, first)
    assert f"{first} before it stays" in reasons(report, early)
    assert dropped(retain(store, "12h")) == [first, early, late]


def test_a_step_needs_those_between_its_checkpoint_and_itself(store: Store) -> None:
    """A retired step's samples stay while a later step is replayed through it, or training goes on."""
    units = [add_unit(store, "serve", turns(name)) for name in "abcd"]
    training = [checkpoint(0, None, None)]
    for step, name in enumerate("abcd"):
        training += [planned(step, step, [name]), committed(step, step + 1)]
        training += [checkpoint(2)] if step == 1 else []
    train = add_unit(store, "train", training)
    retire_steps(store, "r", "actor", "x", steps=(0, 2))
    report = retain(store, ALL, dry_run=True)
    assert dropped(report) == units[:2]
    assert "step 3 of policy 'actor' in run 'r' needs trajectory c" in reasons(report, units[2])
    retire_steps(store, "r", "actor", "x", steps=(3, 3))
    assert dropped(retain(store, ALL, dry_run=True)) == [*units, train]


def test_a_planned_step_keeps_its_samples(store: Store) -> None:
    """A step that was planned and is perhaps running keeps its samples; one that failed does not."""
    failed = add_unit(store, "one", turns("a"))
    running = add_unit(store, "two", turns("b"))
    add_unit(
        store, "train", [planned(0, 0, ["a"]), kinds.StepFailed(0, 1, "actor", "x"), planned(0, 0, ["b"], 2)]
    )
    report = retain(store, ALL, dry_run=True)
    assert dropped(report) == [failed]
    assert "planned step 0 of policy 'actor'" in reasons(report, running)
    with store.claim("training policy actor of run r", "wait"), pytest.raises(LaneLockedError):
        retire_steps(store, "r", "actor", "given up", steps=(0, 0))
    retire_steps(store, "r", "actor", "given up", steps=(0, 0))
    assert running in dropped(retain(store, ALL, dry_run=True))


def test_retiring_says_what_there_is(store: Store) -> None:
    """Unknown policies, steps and ranges are refused with what could have been meant."""
    add_unit(store, "train", [planned(0, 0, []), committed(0, 1)])
    for run, steps, before, text in (
        ("no", (0, 0), None, "there is: actor of r"),
        ("r", (5, 9), None, "no such step: it has 0 to 0"),
        ("r", None, None, "either --steps A-B or --before-version N"),
        ("r", (0, 0), 1, "either --steps A-B or --before-version N"),
    ):
        with pytest.raises(UpkeepError, match=text):
            retire_steps(store, run, "actor", "x", steps=steps, before_version=before)
    assert (parse_steps("7"), parse_steps("0-99")) == ((7, 7), (0, 99))
    for bad in ("", "9-1", "a-b", "1-", "-1"):
        with pytest.raises(UpkeepError, match="a step or a range"):
            parse_steps(bad)


def test_what_a_consumer_has_not_read_stays(store: Store) -> None:
    """What a consumer has not dealt with stays, and so does its newest cursor, wherever it is told."""
    first = add_unit(store, "serve", turns("a"))
    second = add_unit(store, "serve", turns("b"))
    old = add_unit(store, "notes", [kinds.CursorMoved("dash", "notes=9")])
    now = add_unit(store, "notes", [kinds.CursorMoved("dash", "notes=9,serve=4")], days_old=9)
    report = retain(store, ALL)
    assert dropped(report) == [old, first]
    assert "consumer 'dash' has dealt with 4 events of lane serve only" in reasons(report, second)
    assert "it says where consumer 'dash' is" in reasons(report, now)


def test_a_consumer_of_the_store(store: Store) -> None:
    """One that reads through `Store.consumer` keeps what it did not commit, and one cursor of its own."""
    units = [add_unit(store, "serve", turns(name)) for name in "ab"]
    with store.consumer("dash") as consumer:
        consumer.poll(4)
        consumer.commit()
        assert dropped(retain(store, ALL, dry_run=True)) == units[:1]
        consumer.poll()
        consumer.commit()
    assert Sealer(store).run_once().damage == {}
    report = retain(store, ALL)
    assert dropped(report) == units
    with store.consumer("dash") as consumer:
        assert [e.kind for e in consumer.poll() if e.lane == "serve"] == []


def test_a_cursor_that_cannot_be_read(store: Store) -> None:
    """It keeps everything, rather than nothing."""
    unit = add_unit(store, "serve", turns("a"))
    add_unit(store, "notes", [kinds.CursorMoved("dash", "serve=4,notes=1"), kinds.CursorMoved("dash", "x")])
    assert "nobody knows what consumer 'dash' has dealt with" in reasons(retain(store, ALL), unit)


def test_readers_with_a_lease(store: Store) -> None:
    """A unit that a reader has open stays until it is released."""
    unit = add_unit(store, "serve", turns("a"))
    _, lease = lease_units(store.path, ["serve"])
    with lease:
        assert "an open reader needs it" in reasons(retain(store, ALL), unit)
    assert dropped(retain(store, ALL)) == [unit]


def test_what_says_that_something_is_gone_is_never_dropped(store: Store) -> None:
    """A unit of the lane in which drops, retirements and erasures are told stays."""
    add_unit(store, "serve", turns("a"))
    retain(store, ALL)
    with store.writer("upkeep"):
        pass
    list(seal_closed(store.path, "upkeep", SealSettings()))
    report = retain(store, ALL)
    assert dropped(report) == []
    assert "it holds segment.dropped" in "; ".join(report.units[-1].why_kept)


def test_run_openings_and_activations_keep_nothing(store: Store) -> None:
    """They speak of a process; every event names its run, and every span its version."""
    records = [kinds.RunOpened("serve", {}), kinds.PolicyActivated("actor", 0, "embedded", "w", "p")]
    unit = add_unit(store, "serve", [*records, *turns("a")])
    assert dropped(retain(store, ALL)) == [unit]


# What it leaves -----------------------------------------------------------------------------------


def _story(store: Store) -> list[str]:
    """Four units in lane serve, a reward beside them, and an unsealed rest."""
    names = [add_unit(store, "serve", [*turns(f"{n}1"), *turns(f"{n}2")]) for n in "abcd"]
    add_unit(store, "judge", [kinds.RewardAssigned(f"{n}1", None, 1.0, "judge") for n in "ab"])
    with store.writer("serve") as writer:
        writer.append([Event(record, "r") for record in turns("tail")]).result(30)
    return names


def test_everything_goes_on_after_it(store: Store, plain: Callable[..., Any]) -> None:
    """What is left reads the same: events, SQL, earlier cuts, tails, and a lane whose writer starts again."""
    _story(store)
    earlier = store.head()
    before = {e.event_id: plain(e) for e in store.events()}
    add_unit(store, "recent", turns("new"), days_old=0.5)
    assert len(dropped(retain(store, "1d"))) == 5
    left = {e.event_id: plain(e) for e in store.events(earlier)}
    assert left == {i: before[i] for i in left}
    assert len(left) == 4
    assert store.head() | {"upkeep": 0} == earlier | {"recent": 4, "upkeep": 0}
    assert {t.opened.name for t in store.trajectories(earlier).values()} == {"tail"}
    assert store.trajectories({"serve": 10, "judge": 2}) == {}  # a cut inside what was dropped
    sql = rb.connect(store.path, as_of="serve=36,judge=2")
    assert sql.execute("select trajectory, turns from trajectories").fetchall() == [("tail", 1)]
    assert sql.execute("select count(*) from rewards").fetchall() == [(0,)]
    with store.tail() as tail:
        assert {e.seq for e in tail.poll() if e.lane == "serve"} == set(range(32, 36))
    with store.writer("serve") as writer:
        assert writer.append([Event(r, "r") for r in turns("again")]).result(30) == 36
    start = unsealed_start(store.path, "serve")  # raises where the chain of units is broken
    assert start.next_seq == 32
    assert Sealer(store).run_once().damage == {}
    assert [v.fault for v in verify_store(store)] == [None] * 4
    assert [u.dropped_us is None for u in current_units(store.path, "serve")][:4] == [False] * 4


def test_a_dry_run_changes_nothing(store: Store) -> None:
    """It says the same as the run that follows, and touches no file."""
    _story(store)
    files = {p: p.stat().st_mtime_ns for p in store.path.rglob("*") if p.is_file()}
    would = retain(store, ALL, dry_run=True)
    assert {p: p.stat().st_mtime_ns for p in store.path.rglob("*") if p.is_file()} == files
    done = retain(store, ALL)
    assert dropped(would) == dropped(done) != []
    assert [u.why_kept for u in would.units] == [u.why_kept for u in done.units]


KILLED = """
import os, signal, sys
from rollbook import store as rb
from rollbook.store.upkeep.retain import retain

log, limit = rb.open(sys.argv[1]), int(sys.argv[2])
left = limit

def count(event, args):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
retain(log, "1d")
print("done", limit - left)
"""


@pytest.mark.crashes
def test_a_killed_retention_is_finished_by_the_next(
    store: Store,
    tmp_path: Path,
    run_python: Callable[..., tuple[int, str, str]],
    plain: Callable[[Event], dict[str, Any]],
) -> None:
    """Killed at any change to the folder, the next run finishes it and says it once; the rest is the same."""
    names = _story(store)
    earlier = store.head()
    code, out, err = run_python(KILLED, shutil.copytree(store.path, tmp_path / "whole"), 10**6)
    assert code == 0, err
    rest = [plain(e) for e in rb.open(tmp_path / "whole").events(earlier)]
    changes = int(out.split()[1])
    assert changes > 12
    for limit in range(1, changes + 1, max(changes // 7, 1)):
        copy = rb.open(shutil.copytree(store.path, tmp_path / f"at-{limit}"))
        assert run_python(KILLED, copy.path, limit)[0] == -9
        list(copy.events())  # readable in between
        retain(copy, "1d")
        assert [plain(e) for e in copy.events(earlier)] == rest, limit
        drops = [e.record for e in copy.events() if isinstance(e.record, kinds.SegmentDropped)]
        assert len(drops) == len({(r.of_lane, r.first_segment) for r in drops}) == len(names) + 1, limit
        assert list(copy.path.glob("sealed/serve/*/*.parquet")) == [], limit
        assert retain(copy, "1d").dropped_bytes == 0
        assert [v.fault for v in verify_store(copy)] == [None] * len(copy.lanes()), limit


# Commands -----------------------------------------------------------------------------------------


def test_the_commands_print_what_they_did(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`retain`, `retire` and `erase` print what they did, for people and as JSON."""
    from rollbook.cli.app import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["rollbook", "store", *map(str, arguments), "--store", str(store.path)]
        )
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    add_unit(store, "serve", turns("a"))
    add_unit(store, "serve", turns("b"))
    add_unit(store, "train", [planned(0, 0, ["b"]), committed(0, 1)])
    code, out, _ = run("retain", "--keep", "7d", "--dry-run")
    assert code == 0
    assert "would drop 1 of 3 sealed units" in out
    code, out, _ = run("retain", "--keep", "7d", "--json")
    values = orjson.loads(out)
    assert [u["dropped"] for u in values["units"]] == [True, False, False]
    assert values["dropped_bytes"] == values["units"][0]["bytes"] > 0
    assert run("retain", "--keep", "soon")[0] == 2
    code, out, _ = run("retire", "--run", "r", "--before-version", 1, "--reason", "space")
    assert out == "retired 1 steps of policy actor in run r\n"
    code, out, _ = run("erase", "--trajectory", "b", "--reason", "asked for")
    assert code == 0
    assert out.startswith("erased the text and tokens of trajectory b (b) of run r: 3 events, 0 large values")
    assert orjson.loads(run("erase", "--trajectory", "b", "--reason", "again", "--json")[1])["units"] == []
