"""A store whose every event lies in a segment of its own, its sealed units, and all that the views say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.sealed.seal import closed_segments, seal_segments
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.sql.views import VIEWS

SEAL = SealSettings(row_group=2)


def scatter(store: Store, lanes: Mapping[str, Iterable[Event]], **settings: Any) -> Store:
    """Append events one by one, so that every turn and trajectory lies in several segments."""
    for lane, events in lanes.items():
        with store.writer(lane, AppendSettings(segment_bytes=1, **settings)) as writer:
            for event in events:
                writer.append([event]).result(30)
    return store


def seal_in_units(store: Store, lane: str, at_once: int) -> None:
    """Seal the lane's closed segments, `at_once` to a unit."""
    numbers = closed_segments(store.path, lane)
    for i in range(0, len(numbers), at_once):
        seal_segments(store.path, lane, numbers[i : i + at_once], SEAL)


def answers(store: Store, cut: str = "head") -> dict[str, list[Any]]:
    """Every row of every view, in an order that does not depend on where it was read."""
    with rb.connect(store.path, as_of=cut) as connection:
        rows = {v.name: connection.execute(f'SELECT * FROM "{v.name}"').fetchall() for v in VIEWS}
    return {name: sorted(map(repr, values)) for name, values in rows.items()}


class Before(dict[str, dict[str, list[Any]]]):
    """Cut -> answers of a store that is only read, asked for once each."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def __missing__(self, cut: str) -> dict[str, list[Any]]:
        return self.setdefault(cut, answers(self.store, cut))
