"""Store.trajectory gives what folding all of the log gives, wherever the trajectory's events are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.scattered import scatter, seal_in_units

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import CutError
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.sealed import point_read
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import remove_sealed_wal
from rollbook.store.sealed.unit import MARKS, TURNS, current_units


def _plain(value: Any) -> Any:
    """Values that compare bit for bit."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [(f.name, _plain(getattr(value, f.name))) for f in fields(value)]
    if isinstance(value, dict):
        return [(key, _plain(entry)) for key, entry in value.items()]
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


CUTS = {"head": None, **{str(n): {"serve": n} for n in (1, 4, 9, 14)}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, story: dict[str, list[Event]]) -> Store:
    """The story with one event a segment, and a trajectory whose requests refer to bodies; only read it."""
    store = rb.open(tmp_path_factory.mktemp("written") / "store", create=True)
    long = "you are careful. " * 40
    ask: Any = ("r", None, "first_turn", None, 0)
    rest: Any = ({"tools": [{"name": long}]}, None, {}, {}, "c")
    more = [
        kinds.TrajectoryOpened("t9", "long"),
        kinds.TurnRequested("t9", "v1", *ask, [{"role": "system", "content": long}], *rest),
        kinds.TurnRequested("t9", "v2", *ask, [{"role": "system", "content": long}], *rest),
    ]
    return scatter(store, {**story, "other": [Event(r, "demo") for r in more]}, body_bytes=256)


@pytest.fixture(scope="module")
def folds(written: Store) -> dict[str, dict[str, Trajectory]]:
    """The fold of each cut."""
    return {name: fold(written.events(cut)) for name, cut in CUTS.items()}


@pytest.fixture
def scattered(written: Store, tmp_path: Path) -> Store:
    """A copy of that store, to be sealed."""
    return rb.open(shutil.copytree(written.path, tmp_path / "store"))


def _seal(store: Store) -> None:
    for lane in store.lanes():
        seal_in_units(store, lane, at_once=3)


def _derive(store: Store) -> None:
    for lane in store.lanes():
        for unit in current_units(store.path, lane):
            build_derived(store.path, unit)


def _drop_wal(store: Store) -> None:
    for lane in store.lanes():
        remove_sealed_wal(store.path, lane, current_units(store.path, lane), 0)


STATES: dict[str, tuple[str, Callable[[Store], None]]] = {
    "sealed": ("live", _seal),
    "derived": ("sealed", _derive),
    "without WAL": ("derived", _drop_wal),
    "without WAL and locations": ("sealed", _drop_wal),
}
"""State -> the one before, and what is done then."""


@pytest.fixture(scope="module")
def states(written: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """That store in each state; only read them."""
    stores = {"live": written}
    for state, (before, act) in STATES.items():
        folder = tmp_path_factory.mktemp("state") / "store"
        stores[state] = rb.open(shutil.copytree(stores[before].path, folder))
        act(stores[state])
    return stores


@pytest.mark.more_but("sealed", "without WAL*")
@pytest.mark.parametrize("state", ["live", *STATES])
def test_a_trajectory_is_the_fold_of_its_events(
    states: dict[str, Store], folds: dict[str, dict[str, Trajectory]], state: str
) -> None:
    """For every trajectory and many cuts, the point read equals the fold of the whole cut."""
    assert set(folds["head"]) == {"t1", "t2", "t9"}
    for name, cut in CUTS.items():
        for trajectory_id in ("t1", "t2", "t9", "t0", "zz"):
            trajectory = states[state].trajectory(trajectory_id, cut)
            assert _plain(trajectory) == _plain(folds[name].get(trajectory_id))


def test_it_sees_what_became_durable_since(scattered: Store) -> None:
    """A store that has answered before answers anew after more was written, sealed or rolled."""
    before = scattered.trajectory("t2")
    assert before is not None
    assert before.finished is None
    with scattered.writer("serve") as writer:
        writer.append([Event(kinds.TrajectoryFinished("t2"), "demo")]).result(30)
        after = scattered.trajectory("t2")
        assert after is not None
        assert after.finished is not None
    _seal(scattered)
    assert _plain(scattered.trajectory("t2")) == _plain(after)


def test_a_cut_beyond_the_store_is_refused(scattered: Store) -> None:
    """A cut that the store does not hold raises CutError, as everywhere."""
    with pytest.raises(CutError, match="holds 99 events"):
        scattered.trajectory("t1", {"serve": 99})


@pytest.mark.parametrize("state", ["live", *STATES])
def test_an_opening_is_found_by_its_name(scattered: Store, states: dict[str, Store], state: str) -> None:
    """In whatever state its lane is, also when it was opened after the store was asked; and no other."""
    names = {"alpha": "t1", "beta": "t2", "long": "t9"}
    openings = [e for e in scattered.events() if isinstance(e.record, kinds.TrajectoryOpened)]
    assert {e.record.name: e.record.trajectory_id for e in openings} == names
    assert scattered.opening("demo", "new") is None
    shutil.rmtree(scattered.path)
    shutil.copytree(states[state].path, scattered.path)
    for event in openings:
        assert scattered.opening(event.run, event.record.name) == (event.record, event.lane)
    for run, name in (("demo", "t1"), ("demo", "alph"), ("other", "alpha"), ("demo", "")):
        assert scattered.opening(run, name) is None
    with scattered.writer("late") as writer:
        opened = kinds.TrajectoryOpened("t10", "new")
        writer.append([Event(opened, "demo")]).result(30)
        assert scattered.opening("demo", "new") == (opened, "late")


def test_units_without_locations_are_read_once(
    states: dict[str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for many trajectories does not read all of a unit for each, be it derived or not."""
    read: list[Any] = []
    whole = point_read.read_file

    def counted(store: Any, unit: Any, name: str, columns: Any = None) -> Any:
        read.append((unit.lane, unit.name, name, *columns))
        return whole(store, unit, name, columns)

    store = rb.open(states["without WAL and locations"].path)
    units = [unit for lane in store.lanes() for unit in current_units(store.path, lane)]
    monkeypatch.setattr(point_read, "read_file", counted)
    trajectories = store.trajectories(None, ["t1", "t2", "t9", "zz"])
    assert set(trajectories) == {"t1", "t2", "t9"}
    assert len(set(read)) == len(read), "some of it twice"
    located = {
        (*file, "trajectory_id") for u in units for file in ((u.lane, u.name, MARKS), (u.lane, u.name, TURNS))
    }
    bodies = {(u.lane, u.name, MARKS, "kind", "extra") for u in units}
    assert located <= set(read) <= located | bodies
