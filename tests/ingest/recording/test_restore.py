"""What a proxy that starts again reads of trainings and syncs, whichever lanes they are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.stories.admission import Story
from tests.fakes.stories.training import RUN, answered, asked, begins, committed, dropped, opened, planned

from rollbook import store
from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.ingest.recording.restore import RunReader
from rollbook.store import Event, Store
from rollbook.store.events import Record, SyncFinished, SyncStarted, TrajectoryFinished, TrajectoryOpened
from rollbook.store.upkeep.sealer import Sealer


class Lanes:
    """A store, and what is told in each of its lanes."""

    def __init__(self, log: Store) -> None:
        self.log = log
        self._writers = {lane: log.writer(lane) for lane in ("a-train", "b-serve", "c-train", "d-serve")}

    def tell(self, lane: str, *records: Record) -> None:
        """Durable once this returns."""
        self._writers[lane].append([Event(record, RUN) for record in records]).result(10)

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
