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
from rollbook.train.doctor.evidence import Course, HeldOut, Launches, Turns
from rollbook.train.doctor.queries import Training


def read_course(log: Store, cut: Cut, run: str, policy: str) -> Course:
    """What the newest training of a policy in a run did up to a cut.

    Raises:
        CorruptionError: a file is damaged.
    """
    with connect_at(log, format_cut(cut)) as connection:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return connection.execute(query).fetchall()

        training = _newest(connection, run, policy)
        steps = rows(training.metrics(*_METRICS))
        return Course(
            training=training,
            rows=[dict(zip(_METRICS, row[1:], strict=True)) for row in steps],
            numbers=[row[0] for row in steps],
            held_out={
                version: HeldOut(mean, deviation**2 / count)
                for version, mean, count, deviation in rows(training.held_out())
            },
            dropped=dict(rows(training.drops())),
            used=sum(int(row[1 + _METRICS.index("samples")] or 0) for row in steps),
            failed=dict(rows(training.failed_steps())),
            syncs=[(version, error) for version, _, error in rows(training.failed_syncs())],
            held_out_losses=dict(rows(training.losses())),
            partial={row[0]: (row[1], row[2]) for row in rows(training.partial_evaluations())},
            turns=[Turns(*row) for row in rows(training.ended_turns())],
            launches=[Launches(*row) for row in rows(training.ended_launches())],
        )


_METRICS = [column.name for column in RECORDED]
_NEWEST = """
    WITH done AS (
        SELECT step, policy_version, split_part(phase, '#', 1) AS training
        FROM steps WHERE run = $run AND policy = $policy AND status = 'committed'
    ), newest AS (
        SELECT * FROM done WHERE step > (
            SELECT coalesce(max(step), -1) FROM done
            WHERE training <> (SELECT arg_max(training, step) FROM done)
        )
    )
    SELECT coalesce(min(step), 0), coalesce(min(policy_version), 0) FROM newest"""
"""The first step of the newest training, and the version that it starts from."""


def _newest(connection: Connection, run: str, policy: str) -> Training:
    [(step, version)] = connection.execute(_NEWEST, {"run": run, "policy": policy}).fetchall()
    return Training(run, policy, step, version)
