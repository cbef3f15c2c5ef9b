"""Selects trajectories, and reads each of them whole while few are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.store.cut import Cut, format_cut
from rollbook.store.errors import InterchangeError
from rollbook.store.events import SPLITS
from rollbook.store.fold.trajectory import Trajectory, TrajectoryFold
from rollbook.store.log.store import Store
from rollbook.store.sql.query import connect
from rollbook.store.sql.sandbox import Connection

NOT_FOLDED = "sample.dropped"
"""A kind that names a trajectory but is not folded into it; training writes it long after."""


@dataclass(frozen=True, slots=True)
class TrajectorySet:
    """The trajectories of a store at a cut; of one run or split only, unless that is None."""

    store: Store
    cut: Cut
    run: str | None = None
    split: str | None = None

    def sql(self) -> str:
        """A query for the ids of the trajectories; its parameters are `parameters`."""
        where = "kind = 'trajectory.opened'"
        if self.run is not None:
            where += " AND run = $run"
        if self.split is not None:
            where += " AND json_extract_string(extra, '$.split') = $split"
        return f"SELECT trajectory_id FROM events WHERE {where}"

    @property
    def parameters(self) -> dict[str, str]:
        """Values of the parameters that `sql` names."""
        values = {"run": self.run, "split": self.split}
        return {name: value for name, value in values.items() if value is not None}

    def connect(self) -> Connection:
        """SQL at the cut."""
        return connect(self.store.path, as_of=format_cut(self.cut))


def select(store: Store, as_of: str, run: str | None, split: str | None) -> TrajectorySet:
    """The trajectories that a command line names.

    Raises:
        CutError: no such cut.
        InterchangeError: no such split, or the run has no trajectory at that cut.
    """
    if split is not None and split not in SPLITS:
        raise InterchangeError(f"split is {split!r}: use one of {', '.join(SPLITS)}, or all")
    selection = TrajectorySet(store, store.cut(as_of, run), run, split)
    if run is not None:
        opened = "SELECT DISTINCT run FROM events WHERE kind = 'trajectory.opened' ORDER BY run"
        runs = [name for (name,) in selection.connect().execute(opened).fetchall()]
        if run not in runs:
            there = f"runs with trajectories: {', '.join(runs)}" if runs else "no run has any"
            raise InterchangeError(f"run {run!r} has no trajectory at {as_of!r}; {there}")
    return selection


def trajectories(selection: TrajectorySet, advance: Callable[[int], Any]) -> Iterator[Trajectory]:
    """Each selected trajectory once, as soon as the last of its events was read.

    In memory are: an id and a number per trajectory, the trajectories between their first and
    their last event, and events about any trajectory from lanes that open none (rewards that
    came late). Arrays stay in the log's own files.

    Args:
        advance: called with how many of the selected trajectories' events were read.

    Raises:
        CorruptionError: acknowledged bytes are damaged.
    """
    missing = _events_each(selection)
    folding = TrajectoryFold()
    for lane in _lanes(selection):
        for event in selection.store.events({lane: selection.cut[lane]}):
            record: Any = event.record
            trajectory_id = getattr(record, "trajectory_id", None)
            if trajectory_id not in missing or event.kind == NOT_FOLDED:
                continue
            folding.add(event)
            advance(1)
            missing[trajectory_id] -= 1
            if not missing[trajectory_id]:
                yield folding[trajectory_id]
                folding.forget(trajectory_id)
                del missing[trajectory_id]


def in_that_order(selection: TrajectorySet) -> dict[str, int]:
    """The ids of the trajectories in the order in which `trajectories` gives them, each with the number of
    its events."""
    order = "ORDER BY max((list_position($lanes, lane), seq))"
    return _events_each(selection, order, lanes=_lanes(selection))


def count_events(selection: TrajectorySet) -> int:
    """How many events `trajectories` will read of the selected ones."""
    return sum(_events_each(selection).values())


def _events_each(selection: TrajectorySet, order: str = "", **parameters: Any) -> dict[str, int]:
    """Trajectory id -> events it is folded from, in an order by SQL."""
    query = (
        f"SELECT trajectory_id, count(*) FROM events WHERE kind <> '{NOT_FOLDED}' "
        f"AND trajectory_id IN ({selection.sql()}) GROUP BY trajectory_id {order}"
    )
    return dict(selection.connect().execute(query, {**selection.parameters, **parameters}).fetchall())


def _lanes(selection: TrajectorySet) -> list[str]:
    """Lanes with such events: first those that only add to trajectories of other lanes, each group sorted.

    If they were read last, every trajectory they mention would stay in memory until then.
    """
    query = (
        f"SELECT lane FROM events WHERE kind <> '{NOT_FOLDED}' AND trajectory_id IS NOT NULL GROUP BY lane "
        "ORDER BY count_if(kind IN ('trajectory.opened', 'turn.requested')) > 0, lane"
    )
    return [lane for (lane,) in selection.connect().execute(query).fetchall()]
