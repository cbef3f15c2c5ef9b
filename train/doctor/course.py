"""Reads the course of a training from its log."""

from __future__ import annotations

from typing import Any

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.sql.metrics_view import RECORDED
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.train.doctor.signs import Course

_METRICS = ", ".join(column.name for column in RECORDED)


def read_course(log: Store, cut: Cut, run: str, policy: str) -> Course:
    """What the training of a policy in a run did up to a cut.

    Raises:
        CorruptionError: a file is damaged.
    """
    with connect_at(log, format_cut(cut)) as connection:
        of = {"run": run, "policy": policy}
        rows = _rows(
            connection, f"SELECT step, {_METRICS} FROM metrics WHERE {_OF} AND {_KEPT} ORDER BY step", of
        )
        names = [column.name for column in RECORDED]
        used = _rows(connection, f"SELECT sum(samples) FROM metrics WHERE {_OF} AND {_KEPT}", of)[0][0]
        failed = (
            f"SELECT step, arg_max(error, attempt) FROM steps WHERE {_OF} AND status = 'failed' GROUP BY ALL"
        )
        return Course(
            rows=[dict(zip(names, row[1:], strict=True)) for row in rows],
            numbers=[row[0] for row in rows],
            held_out=dict(_rows(connection, _HELD_OUT, {"run": run})),
            dropped=dict(_rows(connection, _DROPPED, {"run": run})),
            used=int(used or 0),
            failed=dict(_rows(connection, failed, of)),
            syncs=[error for (error,) in _rows(connection, _SYNCS, of)],
            held_out_losses=dict(_rows(connection, _LOSSES, of)),
        )


_OF = "run = $run AND policy = $policy"
_KEPT = "status = 'committed'"
_HELD_OUT = """
    SELECT max_version, avg(reward) FROM trajectories
    WHERE run = $run AND split = 'eval' AND reward IS NOT NULL AND max_version IS NOT NULL GROUP BY ALL"""
_LOSSES = f"""
    SELECT policy_version, arg_max(loss, time) FROM evaluations
    WHERE {_OF} AND loss IS NOT NULL GROUP BY ALL"""
_DROPPED = "SELECT rule, count(*) FROM drops WHERE run = $run GROUP BY ALL"
_SYNCS = f"SELECT coalesce(error, '') FROM syncs WHERE {_OF} AND status = 'failed' ORDER BY started"


def _rows(connection: Connection, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    return connection.execute(query, values).fetchall()
