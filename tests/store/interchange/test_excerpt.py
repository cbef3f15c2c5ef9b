"""Excerpts: some events of a store in a store of its own, each where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store, connect
from rollbook.store import events as kinds
from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError
from rollbook.store.events.event import about
from rollbook.store.interchange.excerpt import Redaction, rows_about, rows_at, write_excerpt
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units, unit_folder, write_manifest
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.compact import compact
from rollbook.store.upkeep.verify import verify_store

LONG = "a text that is stored once, as a body: " + "x" * 400
IDS = [f"t{i}" for i in range(6)]
LANES = ("serve", "two")


def _trajectory(name: str, turns: int) -> list[kinds.Record]:
    """A trajectory whose turns ask with a body that others have too, and with one of its own."""
    records: list[kinds.Record] = [
        kinds.TrajectoryOpened(
            name, f"name of {name}", f"group of {name[-1]}", f"task {name}", labels={"l": name}
        )
    ]
    for i in range(turns):
        messages = [{"role": "user", "content": LONG}, {"role": "user", "content": f"{LONG} of {name}"}]
        ids = kinds.token_ids([1, 2, i])
        records += [
            turn_requested(name, f"{name}.{i}", root_reason="first", messages=messages, requested_model="m"),
            turn_completed(
                name,
                f"{name}.{i}",
                policy_version=i,
                prompt_ids=ids,
                completion_ids=ids,
                version_spans=(kinds.VersionSpan("actor", i, 0, 3),),
                prompt_length=3,
                reply={"content": f"reply {i} of {name}"},
            ),
        ]
    place, output = (
        {"epoch": 0, "task": f"task {name}", "sample": 0},
        {"stdout": {"path": "out of", "bytes": 9}},
    )
    records += [
        kinds.LaunchStarted(name, "l", "r", place, 1, "python", {"level": "none"}, "owner of", {}, "key of"),
        kinds.LaunchEnded(name, "l", "agent_error", f"reply 0 of {name}", output=output, by="key of"),
    ]
    return [*records, kinds.RewardAssigned(name, None, 1.0), kinds.TrajectoryFinished(name)]


def _record(folder: Path, sealed: int) -> Store:
    """A store of trajectories that are interleaved and cross lanes, of which so many segments are sealed."""
    log = rb.open(folder, create=True)
    small = AppendSettings(body_bytes=256, segment_bytes=4096)
    for at, lane in enumerate(LANES):
        stories = [_trajectory(name, 1 + i % 3) for i, name in enumerate(IDS) if i % 2 == at]
        stories += [[kinds.LabelAdded(name, None, "late", f"label of {name}") for name in IDS]]
        stories += [
            [kinds.SampleDropped(IDS[0], "t0.0", "stale", "r", 3, {}), kinds.StepFailed(3, 1, "actor", "x")]
        ]
        with log.writer(lane, small) as writer:
            for turn in range(max(map(len, stories))):
                events = [Event(story[turn], "run") for story in stories if turn < len(story)]
                writer.append(events).result(30)
        for _ in range(sealed):
            for unit in seal_closed(log.path, lane, SealSettings(keep_wal_bytes=0)):
                for segment in unit.segments:
                    (log.path / "lanes" / lane / f"{segment.number:08d}.wal").unlink()
    return log


@pytest.fixture(scope="module", params=[0, 1], ids=["unsealed", "sealed"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of which nothing, or all but each lane's last segment, is sealed. Read it; never write."""
    log = _record(tmp_path_factory.mktemp("source") / "store", request.param)
    assert all(bool(current_units(log.path, lane)) == bool(request.param) for lane in LANES)
    return log


def _excerpt(
    log: Store, folder: Path, ids: set[str], cut: Cut | None = None, *, redact: bool = False
) -> Store:
    cut = log.head() if cut is None else cut
    failed = list(log.events_of([kinds.StepFailed.KIND], cut))
    rows = [rows_about(log, ids, cut), rows_at(log, failed, cut)]
    written = write_excerpt(folder, cut, rows, redaction=Redaction() if redact else None)
    excerpt = rb.open(folder)
    assert written.head == excerpt.head()
    assert written.events == sum(1 for _ in excerpt.events())
    assert written.trajectories == len(ids)
    return excerpt


def _belongs(event: Event, ids: set[str]) -> bool:
    if event.kind == kinds.BodyStored.KIND:
        return False
    of_training = about(event.kind).of in ("policy", "run")
    return event.kind == kinds.StepFailed.KIND or (
        not of_training and getattr(event.record, "trajectory_id", None) in ids
    )


@pytest.mark.more_but("sealed")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=4)
@given(ids=st.sets(st.sampled_from(IDS)), share=st.floats(0, 1))
def test_every_event_is_where_it_was(
    source: Store,
    plain: Callable[[Event], dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    ids: set[str],
    share: float,
) -> None:
    """What an excerpt holds is what the source holds of these trajectories, bit for bit, and nothing else."""
    excerpt = _excerpt(source, tmp_path_factory.mktemp("made") / "excerpt", ids)
    whole = [event for event in source.events() if _belongs(event, ids)]
    bodies = [event for event in excerpt.events() if event.kind == kinds.BodyStored.KIND]
    assert [plain(e) for e in excerpt.events() if e.kind != kinds.BodyStored.KIND] == [
        plain(e) for e in whole
    ]
    assert bool(bodies) == bool(ids)
    cut = {lane: int(count * share) for lane, count in source.head().items()}
    for at in (cut, excerpt.head()):
        assert [plain(e) for e in excerpt.events(at) if e.kind != kinds.BodyStored.KIND] == [
            plain(e) for e in source.events(at) if _belongs(e, ids)
        ]
        inside = source.trajectories(at, ids)
        assert set(excerpt.trajectories(at)) == set(inside)
        assert [plain(e) for e in excerpt.events_about(ids, at)] == [
            plain(e) for e in source.events_about(ids, at) if _belongs(e, ids)
        ]
    behind = [plain(e) for e in excerpt.events(start=cut) if e.kind != kinds.BodyStored.KIND]
    assert behind == [plain(e) for e in source.events(start=cut) if _belongs(e, ids)]
    assert [e.seq for e in excerpt.tail(cut).poll()] == [e.seq for e in excerpt.events(start=cut)]
    verified = verify_store(excerpt)
    assert [lane.fault for lane in verified] == [None, None]
    assert sum(lane.events + lane.left_out for lane in verified) == sum(source.head().values())


@pytest.mark.more_but("sealed")
def test_views_read_it(source: Store, tmp_path: Path) -> None:
    """SQL gives of its trajectories what it gives in the source, and nothing of others."""
    excerpt = _excerpt(source, tmp_path / "excerpt", {"t1", "t4"})
    queries = (
        "select * from trajectories where trajectory_id in ('t1', 't4') order by all",
        "select * exclude (lane) from turns where trajectory_id in ('t1', 't4') order by turn_id",
        "select * from tokens where trajectory_id in ('t1', 't4') order by turn_id, position",
    )
    for query in queries:
        with connect(source.path) as theirs, connect(excerpt.path) as ours:
            rows = ours.execute(query).fetchall()
            assert rows == theirs.execute(query).fetchall()
            assert rows
    with connect(excerpt.path) as ours:
        assert ours.execute("select count(distinct trajectory_id) from trajectories").fetchall() == [(2,)]


def test_one_goes_on_writing(source: Store, tmp_path: Path, notes: Callable[..., list[Event]]) -> None:
    """A writer's events come behind those that were left out; what is sealed is not merged away."""
    excerpt, end = _excerpt(source, tmp_path / "excerpt", {"t2"}), source.head()["serve"]
    for _ in range(2):
        with excerpt.writer("serve") as writer:
            first = writer.append(notes(3)).result(30)
    assert first == end + 3
    assert len(list(seal_closed(excerpt.path, "serve", SealSettings()))) == 1
    assert list(compact(excerpt.path, "serve", SealSettings())) == []
    assert [e.seq for e in excerpt.events_of([kinds.TurnFailed.KIND])] == [*range(end, end + 6)]
    assert [lane.fault for lane in verify_store(excerpt)] == [None, None]


def test_a_manifest_that_lies_is_found(source: Store, tmp_path: Path) -> None:
    """An event more, or fewer, than was left out is a fault; a whole unit has no gaps."""
    excerpt = _excerpt(source, tmp_path / "excerpt", {"t3"})
    [unit] = current_units(excerpt.path, "two")
    for count in (unit.left_out - 1, unit.left_out + 1, 0):
        write_manifest(unit_folder(excerpt.path, unit), replace(unit, left_out=count))
        assert [lane.fault is None for lane in verify_store(excerpt)] == [True, False]
    with pytest.raises(CorruptionError, match="does not hold event"):
        list(excerpt.events())
    for count in (-1, unit.next_seq + 1):
        write_manifest(unit_folder(excerpt.path, unit), replace(unit, left_out=count))
        with pytest.raises(CorruptionError, match="events left out"):
            list(excerpt.events())


def test_text_is_taken_out(source: Store, tmp_path: Path) -> None:
    """No text of the trajectories is in any file; token ids, numbers and groups are as they were."""
    ids = {"t0", "t2", "t3"}
    excerpt = _excerpt(source, tmp_path / "excerpt", ids, redact=True)
    rows = b"".join(orjson.dumps(e.record, default=str) for e in excerpt.events() if e.kind != "step.failed")
    texts = (b"name of", b"task t", b"group of", b"reply 0 of", b"stored once", b"label of")
    for text in (*texts, b"out of", b"owner of", b"key of"):
        assert text in b"".join(orjson.dumps(e.record, default=str) for e in source.events())
        assert text not in rows
    before, after = source.trajectories(None, ids), excerpt.trajectories()
    for name in ids:
        [theirs, ours] = [list(trajectories[name].turns.values()) for trajectories in (before, after)]
        assert [t.completed.completion_ids.tolist() for t in ours if t.completed] == [
            t.completed.completion_ids.tolist() for t in theirs if t.completed
        ]
        assert after[name].reward() == before[name].reward() == 1.0
    groups = {name: after[name].opened.group for name in ids}
    assert len(set(groups.values())) == len({before[name].opened.group for name in ids})
    erased = {e.trajectory_id for lane in LANES for u in current_units(excerpt.path, lane) for e in u.erased}
    assert erased == ids
