"""How far rollouts of one name are, as the log has it: by SQL, since a launcher that begins again is to wait
seconds for it, however many launches there were.
"""

from __future__ import annotations

from typing import Any

from rollbook.store import Store, format_cut
from rollbook.store.events import Json
from rollbook.store.sql.query import connect_at


def rollout_course(store: Store, run: str, name: str) -> Json:
    """The course of the rollouts of a name.

    Returns:
        `cut`, that it is of. `places`: `epoch`, `task`, `sample`, `attempt`, `launch_id` and `status`, each a
        list, of the last attempt in each place; `status` is null where that has not ended; and `spared`, how
        many attempts of the place failed because the proxy was away. `orphans`: of
        launches without an end `launch_id`, `trajectory_id`, their place and attempt, and what the trajectory
        was `finished` with, or null. `unlaunched`: names of trajectories that were opened and have no launch.

    Raises:
        CorruptionError: a file is damaged.
    """
    cut, given = format_cut(store.head()), {"run": run, "name": name}
    with connect_at(store, cut) as connection:

        def table(query: str) -> dict[str, list[Any]]:
            found = connection.sql(query, params=given).to_arrow_table()
            return {column: found[column].to_pylist() for column in found.column_names}

        places = table(_PLACES)
        orphans = table(_ORPHANS)
        unlaunched = table(_UNLAUNCHED)["trajectory"]
    rows = [dict(zip(orphans, row, strict=True)) for row in zip(*orphans.values(), strict=True)]
    return {"cut": cut, "places": places, "orphans": rows, "unlaunched": unlaunched}


# What was erased has no task.
_PLACES = """
    SELECT epoch, task, sample, attempt, launch_id, CASE WHEN ended IS NOT NULL THEN status END AS status,
           count(*) FILTER (proxy_away) OVER (PARTITION BY epoch, task, sample) AS spared
    FROM launches WHERE run = $run AND rollout = $name AND task IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY epoch, task, sample ORDER BY attempt DESC, started DESC) = 1
    ORDER BY epoch, task, sample"""
_ORPHANS = """
    SELECT l.launch_id, l.trajectory_id, l.epoch, l.task, l.sample, l.attempt,
           CASE WHEN t.finished IS NOT NULL THEN t.status END AS finished
    FROM launches l LEFT JOIN trajectories t USING (run, trajectory_id)
    WHERE run = $run AND rollout = $name AND l.ended IS NULL AND l.task IS NOT NULL
    ORDER BY l.started, l.launch_id"""
_UNLAUNCHED = """
    SELECT trajectory FROM trajectories
    WHERE run = $run AND labels->>'$.rollout' = $name
      AND trajectory_id NOT IN (SELECT trajectory_id FROM launches WHERE run = $run AND rollout = $name)
    ORDER BY trajectory"""
