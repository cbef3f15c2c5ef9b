"""Reads the course of a training from its log.

A policy may have had several trainings one after the other, as an imitation before a reinforcement: the
course is that of the newest. What changes from one to the next is no sign of anything.
"""

from __future__ import annotations

from typing import Any

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.sql.metrics_view import RECORDED
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.train.doctor.signs import Course, HeldOut


def read_course(log: Store, cut: Cut, run: str, policy: str) -> Course:
    """What the newest training of a policy in a run did up to a cut.

    Raises:
        CorruptionError: a file is damaged.
    """
    with connect_at(log, format_cut(cut)) as connection:
        [(step, version)] = _rows(connection, _FIRST, {"run": run, "policy": policy})
        steps = {"run": run, "policy": policy, "step": step}
        versions = {"run": run, "policy": policy, "version": version}
        rows = _rows(connection, _STEPS, steps)
        return Course(
            rows=[dict(zip(_METRICS, row[1:], strict=True)) for row in rows],
            numbers=[row[0] for row in rows],
            held_out={
                at: HeldOut(mean, variance / count)
                for at, mean, count, variance in _rows(
                    connection, _HELD_OUT, {"run": run, "version": version}
                )
            },
            dropped=dict(_rows(connection, _DROPPED, {"run": run, "step": step})),
            used=sum(int(row[1 + _METRICS.index("samples")] or 0) for row in rows),
            failed=dict(_rows(connection, _FAILED, steps)),
            syncs=[error for (error,) in _rows(connection, _SYNCS, versions)],
            held_out_losses=dict(_rows(connection, _LOSSES, versions)),
        )


_METRICS = [column.name for column in RECORDED]
_OF = "run = $run AND policy = $policy"
_FIRST = f"""
    WITH done AS (
        SELECT step, policy_version, split_part(phase, '#', 1) AS training
        FROM steps WHERE {_OF} AND status = 'committed'
    ), newest AS (
        SELECT * FROM done WHERE step > (
            SELECT coalesce(max(step), -1) FROM done
            WHERE training <> (SELECT arg_max(training, step) FROM done)
        )
    )
    SELECT coalesce(min(step), 0), coalesce(min(policy_version), 0) FROM newest"""
"""The first step of the newest training, and the version that it starts from."""
_STEPS = f"""
    SELECT step, {", ".join(_METRICS)} FROM metrics
    WHERE {_OF} AND status = 'committed' AND step >= $step ORDER BY step"""
_FAILED = f"""
    SELECT step, arg_max(error, attempt) FROM steps
    WHERE {_OF} AND status = 'failed' AND step >= $step GROUP BY ALL"""
_HELD_OUT = """
    SELECT max_version, avg(reward), count(*), coalesce(max(variance), 0) FROM (
        SELECT max_version, reward, var_samp(reward) OVER () AS variance FROM trajectories
        WHERE run = $run AND split = 'eval' AND reward IS NOT NULL AND max_version >= $version
    ) GROUP BY ALL"""
"""Rewards of a version's held-out trajectories; the variance is that of all of them."""
_LOSSES = f"""
    SELECT policy_version, arg_max(loss, time) FROM evaluations
    WHERE {_OF} AND loss IS NOT NULL AND policy_version >= $version GROUP BY ALL"""
_DROPPED = "SELECT rule, count(*) FROM drops WHERE run = $run AND step >= $step GROUP BY ALL"
_SYNCS = f"""
    SELECT coalesce(error, '') FROM syncs
    WHERE {_OF} AND status = 'failed' AND policy_version >= $version ORDER BY started"""


def _rows(connection: Connection, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    return connection.execute(query, values).fetchall()
