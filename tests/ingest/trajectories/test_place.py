"""Whose a trajectory is."""

from __future__ import annotations

from collections import Counter

from rollbook.ingest.trajectories.place import ALONE, FIRST, Place, owner_of
from rollbook.store.events import QUARANTINE


def test_every_name_has_one_owner_for_good() -> None:
    """Names spread over the workers, and the numbers never change: trajectories would change their lanes."""
    names = [f"task-{number}" for number in range(3000)]
    counts = Counter(owner_of(name, 3) for name in names)
    assert sorted(counts) == [0, 1, 2]
    assert min(counts.values()) > 900
    assert [owner_of(name, 4) for name in ("task-0", "task-1", "task-2", "é", "\udcff")] == [3, 0, 2, 3, 3]
    assert {owner_of(name, 1) for name in names} == {FIRST}
    assert owner_of(f"{QUARANTINE}/anything", 7) == FIRST


def test_new_names_are_ones_own() -> None:
    """A worker that names a trajectory itself writes it, too."""
    place = Place(2, 5)
    names = [place.new_name() for _ in range(20)]
    assert all(place.owns(name) for name in names)
    assert len({*names}) == 20
    assert not any(Place(1, 5).owns(name) for name in names)


def test_lanes() -> None:
    """A proxy alone writes the lane that it was given."""
    assert ALONE.lane("serve") == "serve"
    assert [Place(number, 2).lane("serve") for number in range(2)] == ["serve-0", "serve-1"]
