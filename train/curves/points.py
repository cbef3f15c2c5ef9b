"""The points of a training's curves: a step's row of the view `metrics`, an evaluation's of
`evaluations`.

A point is the same whether it is read from the log afterwards or made from the training's
records as they are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.store import Store
from rollbook.store.cut import Cut, format_cut
from rollbook.store.events import EvalFinished, Record, StepAbandoned, StepCommitted, StepPlanned
from rollbook.store.fold.history import gone_versions
from rollbook.store.sql.columns import EVALUATIONS, ViewColumn
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.store.sql.training_views import METRICS, RECORDED
from rollbook.train.config.evaluation import OF_AGENTS

STEPS, HELD_OUT = "metrics", "evaluations"
"""The views, and what a curve's name begins with: `metrics/loss`, `evaluations/loss`."""
WHOLE, NOT_WHOLE = "whole", "_not_whole"
"""A column of evaluations, and the end of the name of a curve of those that are not."""
_NUMBERS = ("DOUBLE", "BIGINT")


def _numbers(columns: Sequence[ViewColumn]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column.type in _NUMBERS and column.name != "step")


OF_STEPS, OF_EVALUATIONS = _numbers(METRICS.columns), _numbers(EVALUATIONS)
_MEASURED = frozenset(OF_EVALUATIONS) - {"policy_version", "samples", "tokens", "trajectories", "expected"}


@dataclass(frozen=True, slots=True)
class Point:
    """Values at a step, by the names of their curves. An evaluation stands at the step that starts from its
    version, or would; `time` is in seconds since 1970."""

    kind: str
    step: int
    version: int
    time: float
    values: Mapping[str, float]


def read_points(log: Store, cut: Cut, run: str, policy: str) -> list[Point]:
    """The points of a policy at a cut, in the order of their steps; steps that were abandoned have none.

    Raises:
        CorruptionError: a file is damaged.
    """
    if next(log.events_of([StepCommitted.KIND, EvalFinished.KIND], cut), None) is None:
        return []
    abandoned = [event for event in log.events_of([StepAbandoned.KIND], cut) if event.run == run]
    records = [e.record for e in abandoned if isinstance(e.record, StepAbandoned)]
    gone = gone_versions(record for record in records if record.policy == policy)
    with connect_at(log, format_cut(cut)) as connection:
        params = {"run": run, "policy": policy}
        points = [*_rows(connection, _EVALUATED, HELD_OUT, (*OF_EVALUATIONS, WHOLE), params)]
        points = [point for point in points if point.version not in gone]
        points += _rows(connection, _STEPS, STEPS, OF_STEPS, params)
    return sorted(points, key=lambda point: (point.step, point.kind != HELD_OUT, point.version))


def _rows(
    connection: Connection, query: str, kind: str, columns: Sequence[str], params: Mapping[str, str]
) -> Iterator[Point]:
    named = ", ".join(f"v.{column}" for column in columns)
    for step, version, at, *values in connection.execute(query.format(columns=named), params).fetchall():
        yield Point(kind, step, version, at, _named(kind, dict(zip(columns, values, strict=True))))


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The values by the names of their curves; partial evaluations have curves of their own."""
    partial = OF_AGENTS if values.get(WHOLE) is False else frozenset()
    return {
        f"{kind}/{name}{NOT_WHOLE if name in partial else ''}": float(value)
        for name, value in values.items()
        if value is not None and name != WHOLE
    }


_STEPS = """
    SELECT v.step, v.policy_version, epoch(s.committed), {columns}
    FROM metrics v JOIN steps s USING (run, policy, step, status)
    WHERE v.run = $run AND v.policy = $policy AND v.status = 'committed'"""
_NEXT = """coalesce((SELECT max(step) + 1 FROM steps WHERE run = $run AND policy = $policy
                     AND status IN ('committed', 'abandoned')), 0)"""
_EVALUATED = f"""
    SELECT coalesce(s.step, m.step + 1, {_NEXT}), v.policy_version, epoch(v.time), {{columns}}
    FROM evaluations v LEFT JOIN steps s ON s.run = v.run AND s.policy = v.policy
      AND s.policy_version = v.policy_version AND s.status = 'committed'
    LEFT JOIN steps m ON m.run = v.run AND m.policy = v.policy
      AND m.output_version = v.policy_version AND m.status = 'committed'
    WHERE v.run = $run AND v.policy = $policy"""


@dataclass(slots=True)
class Following:
    """Makes points of a training's records as they are written.

    Attributes:
        next_step: number of the step that is planned next.
    """

    policy: str
    next_step: int
    _plan: StepPlanned | None = None
    _planned: float = field(default=0.0)

    def point(self, record: Record) -> Point | None:
        """The point that a record makes; None where it makes none."""
        now = time.time()
        match record:
            case StepPlanned(policy=self.policy):
                self._plan, self._planned = record, now
            case StepCommitted(policy=self.policy) if self._plan is not None:
                self.next_step = record.step + 1
                return self._step(record, self._plan, now)
            case EvalFinished(policy=self.policy):
                return self._evaluation(record, now)
        return None

    def _step(self, record: StepCommitted, plan: StepPlanned, now: float) -> Point:
        seconds = now - self._planned
        metrics = record.metrics
        values: dict[str, Any] = {column.name: metrics.get(column.name) for column in RECORDED}
        values |= {"policy_version": plan.policy_version, "learning_rate": plan.learning_rate}
        values |= {
            "seconds": seconds,
            "tokens_s": metrics.get("trained_tokens", 0) / seconds if seconds else None,
        }
        return Point(STEPS, record.step, plan.policy_version, now, _named(STEPS, values))

    def _evaluation(self, record: EvalFinished, now: float) -> Point:
        values = {name: getattr(record, name, None) for name in (*OF_EVALUATIONS, WHOLE)}
        values |= {name: record.metrics.get(name) for name in _MEASURED if name in record.metrics}
        return Point(HELD_OUT, self.next_step, record.policy_version, now, _named(HELD_OUT, values))
