"""The order of a trajectory's turns, where it takes more than one lane to know it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store
from rollbook.store.cut import Cut


def in_turn_order(log: Store, cut: Cut, trajectories: pa.Table, turns: pa.Table) -> pa.Table:
    """The turns; those of a trajectory that several lanes wrote in the order that the fold gives them.

    Args:
        trajectories, turns: as `References` has them.
    """
    lanes = turns.group_by("place").aggregate([("lane", "count_distinct")])
    several = lanes.filter(pc.greater(lanes["lane_count_distinct"], 1))["place"].to_pylist()
    if not several:
        return turns
    ids = {trajectories["trajectory_id"][place].as_py(): place for place in several}
    order = np.arange(turns.num_rows)
    at = turns["place"].to_numpy()
    for trajectory_id, trajectory in log.trajectories(cut, ids).items():
        mine = np.flatnonzero(at == ids[trajectory_id])
        names = turns["turn_id"].take(pa.array(mine)).to_pylist()
        places = {turn_id: place for place, turn_id in enumerate(trajectory.turns)}
        order[mine] = mine[np.argsort([places.get(name, len(places)) for name in names], kind="stable")]
    return turns.take(pa.array(order))
