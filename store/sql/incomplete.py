"""Finds incomplete turns: answered, but without their request or their trajectory's opening in the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.store.log.store import Store
from rollbook.store.sql.query import connect_at

_ROWS = 4096
_QUERY = """
    SELECT any_value(run) AS run, trajectory_id, turn_id, 'turn.requested' AS missing
    FROM internal.turn_parts WHERE NOT whole GROUP BY trajectory_id, turn_id
    HAVING any_value(completed) IS NOT NULL AND any_value(requested) IS NULL
    UNION ALL
    SELECT run, trajectory_id, turn_id, 'trajectory.opened'
    FROM internal.turn_scalars ANTI JOIN internal.trajectory_scalars USING (trajectory_id)
    ORDER BY ALL"""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A turn in the log without its event of the kind `missing`: it is in no view, and never trained."""

    run: str
    trajectory_id: str
    turn_id: str
    missing: str

    def __str__(self) -> str:
        return (
            f"turn {self.turn_id} of trajectory {self.trajectory_id} (run {self.run}) has no {self.missing}: "
            "it was answered, and is in no view"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in ("run", "trajectory_id", "turn_id", "missing")}


def incomplete_turns(log: Store) -> Iterator[Incomplete]:
    """The log's incomplete turns, in bounded memory."""
    with connect_at(log) as connection:
        found = connection.execute(_QUERY)
        while rows := found.fetchmany(_ROWS):
            yield from (Incomplete(*row) for row in rows)
