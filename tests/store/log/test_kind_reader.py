"""Events of some kinds: the same as reading everything and passing over the rest, sealed or not."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import CutError
from rollbook.store.events.schema import row_of
from rollbook.store.settings import AppendSettings
from rollbook.store.upkeep.sealer import Sealer

SMALL = AppendSettings(segment_bytes=1 << 14)
WANTED = [
    ["step.committed"],
    ["sample.dropped", "checkpoint.written", "trajectory.finished"],
    ["turn.requested", "run.opened"],
    ["no.such.kind"],
]


def _turn(name: str, i: int) -> list[Any]:
    text = f"{name} says {i} " * 40
    return [
        kinds.TrajectoryOpened(name, name),
        turn_requested(name, f"{name}.0", root_reason="first", messages=[{"role": "user", "content": text}]),
        kinds.SampleDropped(name, f"{name}.0", "staleness", "digest", i, {"staleness": i}),
        kinds.TrajectoryFinished(name),
    ]


def _fill(log: Store, lane: str, first: int) -> None:
    with log.writer(lane, SMALL) as writer:
        for i in range(first, first + 60):
            records = _turn(f"{lane}{i}", i)
            if not i % 7:
                records.append(kinds.StepCommitted(i, 1, "actor", i + 1, {}, {"loss": float(i)}))
                records.append(kinds.RunOpened("train", {"steps": i}))
            writer.append([Event(record, "r") for record in records]).result(30)


@pytest.fixture(scope="module", params=["live", "sealed", "both"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two lanes of small segments, sealed, not sealed, or in part; only read it."""
    log = rb.open(tmp_path_factory.mktemp("filled") / "store", create=True)
    for half in (0, 60):
        for lane in ("a", "b"):
            _fill(log, lane, half)
        if request.param == "sealed" or (request.param == "both" and not half):
            Sealer(log).run_once()
    return log


@pytest.fixture(scope="module")
def ranges(log: Store) -> list[tuple[dict[str, int], dict[str, int], list[Event]]]:
    """(cut, start, all events between): at the head and within units and segments, each from two starts."""
    head = log.head()
    rng = np.random.default_rng(3)
    cuts = [head, *({lane: int(rng.integers(0, end + 1)) for lane, end in head.items()} for _ in range(4))]
    spans: list[tuple[dict[str, int], dict[str, int], list[Event]]] = []
    for cut in cuts:
        starts = [{}, {lane: int(rng.integers(0, end + 1)) for lane, end in cut.items()}]
        spans += [(cut, start, list(log.events(cut, start))) for start in starts]
    return spans


def _rows(events: Any) -> list[Any]:
    return [(e.lane, e.seq, e.event_id, row_of(e)) for e in events]


@pytest.mark.more_but("both-*")
@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted[0])
def test_the_same_events_as_reading_all(
    log: Store, ranges: list[tuple[dict[str, int], dict[str, int], list[Event]]], wanted: Collection[str]
) -> None:
    """At the head, at cuts within units and segments, and between two cuts: each in its place."""
    for cut, start, events in ranges:
        expected = [e for e in events if e.kind in wanted]
        assert _rows(log.events_of(wanted, cut, start)) == _rows(expected)


@pytest.mark.more_but("both")
def test_a_cut_that_holds_more_than_the_store(log: Store) -> None:
    """It is refused as everywhere."""
    with pytest.raises(CutError, match="holds 99999 events of lane 'a'"):
        log.events_of(["run.opened"], {"a": 99999})


@pytest.mark.more_but("both")
def test_runs_are_those_of_configurations_and_trajectories(log: Store, tmp_path: Path) -> None:
    """Sealed or not, at any cut; a run that only other events name is none."""
    log = rb.open(shutil.copytree(log.path, tmp_path / "store"))
    with log.writer("c", SMALL) as writer:
        writer.append([Event(kinds.RunOpened("train", {}), "opened")]).result(30)
        cut = log.head()
        writer.append([Event(kinds.SampleDropped("x", "x.0", "staleness", "d", 0, {}), "dropped")]).result(30)
        writer.append([Event(kinds.TrajectoryOpened("x", "x"), "later")]).result(30)
    assert log.runs({}) == set()
    assert log.runs({"a": 1}) == {"r"}
    assert log.runs(cut) == {"r", "opened"}
    assert log.runs() == {"r", "opened", "later"}
    with pytest.raises(CutError):
        log.runs({"a": 10**6})
