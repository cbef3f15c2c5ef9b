"""What a proxy that starts again reads of trainings and syncs, whichever lanes they are in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.stories.admission import Story
from tests.fakes.stories.training import RUN, answered, asked, begins, committed, dropped, opened, planned

from rollbook import store
from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.ingest.recording.restore import RunReader
from rollbook.store import Event, Store
from rollbook.store.events import (
    Record,
    SyncFinished,
    SyncStarted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDelivered,
)
from rollbook.store.fold.standings import Drop, Plan
from rollbook.store.sealed.derived import PLANS, STANDINGS
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.sealer import Sealer


class Lanes:
    """A store, and what is told in each of its lanes."""

    def __init__(self, log: Store) -> None:
        self.log = log
        self._take()

    def _take(self) -> None:
        self._writers = {lane: self.log.writer(lane) for lane in ("a-train", "b-serve", "c-train", "d-serve")}

    def tell(self, lane: str, *records: Record) -> None:
        """Durable once this returns."""
        self._writers[lane].append([Event(record, RUN) for record in records]).result(10)

    def seal(self) -> None:
        """All that was told becomes units of its own."""
        (self.log.path / "store.toml").write_text("[seal]\ncompact_bytes = 0\nkeep_wal_bytes = 0\n")
        self.close()
        self._take()
        Sealer(self.log).run_once()

    def close(self) -> None:
        """Give the lanes back."""
        for writer in self._writers.values():
            writer.close()


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Lanes]:
    """Two trainers' lanes and two proxies'."""
    made = Lanes(store.open(tmp_path / "store", create=True))
    yield made
    made.close()


def ended(name: str, group: str) -> list[Record]:
    """A trajectory that ends with a turn to train on."""
    return [opened(name, group), asked(name), *answered(name), TrajectoryFinished(name)]


@pytest.mark.parametrize(("first", "second"), [("a-train", "c-train"), ("c-train", "a-train")])
def test_the_training_that_began_last_is_under_way(lanes: Lanes, first: str, second: str) -> None:
    """An earlier one ended, whose lane is read before or after."""
    lanes.tell("b-serve", *ended("a0", "g"), *ended("a1", "g"))
    lanes.tell(first, begins(2, steps=1), planned(0, ["a0", "a1"]), committed(0))
    lanes.tell(second, begins(2, limit=3, steps=50, steps_done=1), planned(1, ["b0", "b1"]))
    lanes.tell("d-serve", *ended("b0", "g"), *ended("b1", "g"), *ended("c0", "g"))
    lanes.tell(second, committed(1))
    fold = RunReader(lanes.log, RUN).outstanding
    assert fold.training is not None
    assert (fold.training.policy.max_staleness, fold.training.steps_left) == (3, 48)
    assert (fold.version, fold.count, fold.room("g")) == (2, 1, 1)
    lanes.tell(first, begins(2, steps=50, steps_done=50))
    assert RunReader(lanes.log, RUN).outstanding.training is None


@pytest.mark.parametrize("lane", ["b-serve", "d-serve"])
def test_a_drop_of_what_another_lane_holds(lanes: Lanes, lane: str) -> None:
    """Takes away all of its group, and nothing of another by that name; also one that is read later."""
    lanes.tell("a-train", begins(2))
    for name in ("a0", "a1", "b0", "b1"):
        lanes.tell(lane, *ended(name, "g"))
    lanes.tell("c-train", dropped("a0"))
    reader = RunReader(lanes.log, RUN)
    assert (reader.outstanding.count, reader.outstanding.room("g")) == (1, 0)
    lanes.tell("b-serve", *ended("c0", "h"), opened("c1", "h"), *ended("d0", "i"))
    lanes.tell("a-train", dropped("b1"), planned(0, ["c0"]), committed(0))
    reader.refresh()
    assert (reader.outstanding.count, reader.outstanding.room("i")) == (1, 1)
    assert not reader.outstanding._closed


@pytest.mark.parametrize(("first", "second"), [("a-train", "c-train"), ("c-train", "a-train")])
def test_syncs_are_told_in_the_order_in_which_they_were(lanes: Lanes, first: str, second: str) -> None:
    """An engine has the weights of the last one, also of those that are read later."""
    done = [SyncFinished("actor", number, f"s{number}", "http://e", 1, 0.1) for number in range(5)]
    starts = SyncStarted("actor", 1, "s1", "http://e", "disk")
    lanes.tell(first, done[0])
    lanes.tell(second, starts)
    lanes.tell(first, done[2])
    lanes.tell(second, done[1])
    reader = RunReader(lanes.log, RUN)
    assert reader.syncs == [done[0], starts, done[2], done[1]]
    lanes.tell(second, done[3])
    lanes.tell(first, done[4])
    reader.refresh()
    assert reader.syncs == [done[0], starts, done[2], done[1], done[3], done[4]]


def _of_an_older_release(derived: Path) -> None:
    for file in [*derived.rglob(STANDINGS), *derived.rglob(PLANS)]:
        file.unlink()


def _damaged(derived: Path) -> None:
    for file in [*derived.rglob(STANDINGS), *derived.rglob(PLANS)]:
        file.write_bytes(b"ARROW1\0\0 and then nothing that Arrow has")


STATES: dict[str, Callable[[Path], None]] = {
    "derived": lambda derived: None,
    "older": _of_an_older_release,
    "damaged": _damaged,
    "removed": shutil.rmtree,
}


@pytest.mark.parametrize("state", list(STATES))
def test_what_units_hold_in_part_counts_as_a_whole(lanes: Lanes, state: str) -> None:
    """Whatever there is of derived files: turns that were delivered in another unit than they were completed
    in, trajectories of several units, and those that were used, with all of their group."""
    lanes.tell("a-train", begins(2, batch=4, limit=9))
    used = [record for name in ("a0", "a1", "d0", "d1") for record in ended(name, name[0])]
    lanes.tell("b-serve", *used, opened("b0", "b"), opened("b1", "b"), asked("b0"))
    lanes.tell("b-serve", *answered("b0", 3, delivered=False), opened("e0", "e"), asked("e0"))
    lanes.tell("b-serve", *answered("e0", 4, delivered=False), opened("v0", "v", split="eval"))
    lanes.seal()
    lanes.tell("b-serve", TurnDelivered("b0", "b0.0", "sent"), asked("b1"), *answered("b1", 2))
    lanes.tell("a-train", planned(0, ["a0", "a1"]), committed(0), dropped("d0"))
    lanes.seal()
    lanes.tell("b-serve", TrajectoryFinished("b0"), TrajectoryFinished("b1"), opened("e1", "e"))
    assert len(current_units(lanes.log.path, "b-serve")) == 2
    STATES[state](lanes.log.path / "derived")
    reader = RunReader(lanes.log, RUN)
    fold = reader.outstanding
    assert (fold.count, fold.version, fold.room("b"), fold.room("e"), fold.room("d")) == (2, 1, 0, 0, 0)
    known = {
        name: (t.group, t.running, t.productive, t.oldest, t.sampled)
        for name, t in fold._trajectories.items()
    }
    assert known == {
        "b0": ("b", False, True, {"actor": 3}, None),
        "b1": ("b", False, True, {"actor": 2}, None),
        "e0": ("e", True, False, {"actor": 4}, {"e0.0"}),
        "e1": ("e", True, False, {}, set()),
    }
    assert {opened.opened.name for opened in reader.open()} == {"e0", "e1", "v0"}


def test_standings_are_of_their_cut(lanes: Lanes) -> None:
    """Sealed or not, also where the cut ends in the middle of a unit."""

    def rows(end: int) -> list[dict[str, Any]]:
        known = lanes.log.standings(RUN, {"b-serve": end}).drop_columns(["whole", "delivered"])
        return known.sort_by("trajectory_id").to_pylist()

    first = [*ended("a0", "a"), opened("b0"), asked("b0"), *answered("b0", delivered=False)]
    second = [TurnDelivered("b0", "b0.0", "sent"), TrajectoryFinished("b0", "aborted"), *ended("c0", "c")]
    lanes.tell("b-serve", *first, *second)
    before = [rows(end) for end in range(len(first) + len(second) + 1)]
    assert [row["trajectory_id"] for row in before[-1]] == ["a0", "b0", "c0"]
    assert [before[end][1]["sampled"] for end in (6, 8, 9)] == [[], ["b0.0"], []]
    assert [before[end][1]["status"] for end in (9, 10)] == [None, "aborted"]
    lanes.seal()
    assert [rows(end) for end in range(len(before))] == before


def test_of_uses_those_that_are_asked_for(lanes: Lanes) -> None:
    """In the order of the lane, of units that the cut holds."""
    lanes.tell("a-train", dropped("a"), planned(0, ["b", "a", "c"]), planned(1, ["d"]), dropped("e"))
    among = pa.chunked_array([["a", "c", "e"]])
    assert lanes.log.sealed_uses(RUN, "a-train", 4, among) == ([], 0)
    lanes.seal()
    uses, end = lanes.log.sealed_uses(RUN, "a-train", 4, among)
    assert end == 4
    assert [use.trajectories if isinstance(use, Plan) else use.trajectory_id for use in uses] == [
        "a",
        ["a", "c"],
        [],
        "e",
    ]
    assert [use.seq for use in uses if isinstance(use, Drop)] == [0, 3]
    assert lanes.log.sealed_uses("another", "a-train", 4, among) == ([], 4)
    assert lanes.log.sealed_uses(RUN, "a-train", 3, among) == ([], 0)


@given(data=st.data(), size=st.integers(1, 3), sealed=st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_restored_counts_as_what_was_seen(
    data: st.DataObject, size: int, sealed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From columns, sealed or not, and later events comes what the events one by one came to."""
    log = store.open(tmp_path_factory.mktemp("restored") / "store", create=True)
    story, live, reader, at = Story(size), Outstanding(RUN), None, 0
    story.tell("train", begins(size, limit=1000))
    for part in range(2):
        for _ in range(data.draw(st.integers(0, 15))):
            story.go(data.draw)
        events = [
            (lane, Event(record, RUN, time_us=at + i)) for i, (lane, record) in enumerate(story.records[at:])
        ]
        at = len(story.records)
        live.add_all(event for _, event in events)
        for lane in ("train", "a-proxy", "z-proxy"):
            if mine := [event for where, event in events if where == lane]:
                with log.writer(lane) as writer:
                    writer.append(mine).result(10)
        if reader is None:
            if sealed:
                Sealer(log).run_once()
            reader = RunReader(log, RUN)
        else:
            reader.refresh()
        again = reader.outstanding
        assert (again.count, again.version, again.stalled) == (live.count, live.version, live.stalled), part
        groups = {record.group for _, record in story.records if isinstance(record, TrajectoryOpened)}
        assert {group: again.room(group) for group in groups} == {g: live.room(g) for g in groups}
        names = {opened.opened.name for opened in reader.open()}
        assert names == set(story.running)
