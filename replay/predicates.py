"""Finds the first step of a training at which something holds, by what the log recorded of it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import duckdb

from rollbook.store.errors import QueryError
from rollbook.store.log.store import Store
from rollbook.store.sql.metrics_view import METRICS
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import explained

NUMBERS = tuple(column.name for column in METRICS.columns if column.type in ("BIGINT", "DOUBLE"))
"""What can be above or below a bound: the numeric columns of the view `metrics`."""

_STEP = """
    SELECT m.*, s.output_version, s.attempt, s.cut, s.metrics, s.digests, s.manifest, s.planned, s.committed,
           s.phase
    FROM metrics m JOIN steps s
      ON s.run = m.run AND s.policy = m.policy AND s.step = m.step AND s.status = m.status
    WHERE m.run = $run AND m.policy = $policy AND m.status = 'committed'"""
"""A committed step with the columns of `metrics`, and those of `steps` that it does not have."""


@dataclass(frozen=True, slots=True)
class Predicate:
    """A condition on one step, in SQL over the columns of the views `metrics` and `steps`.

    What a step did not record is null there, as is what was no number, and no comparison with null holds.
    """

    condition: str


def threshold(metric: str, *, above: float | None = None, below: float | None = None) -> Predicate:
    """That a metric is above a bound, or below one; with both, outside of what lies between them.

    Args:
        metric: a numeric column of the view `metrics`.

    Raises:
        QueryError: there is no such metric, or no bound is given.
    """
    if metric not in NUMBERS:
        near = get_close_matches(metric, NUMBERS, 3, 0.5)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise QueryError(f'no metric {metric!r}{hint}; list them: rollbook sql "describe metrics"')
    bounds = [(">", above), ("<", below)]
    parts = [f"{metric} {sign} {float(bound)!r}::DOUBLE" for sign, bound in bounds if bound is not None]
    if not parts:
        raise QueryError(f"metric {metric!r}: say what it should be above, or below")
    return Predicate(" OR ".join(parts).replace(" inf::", " 'inf'::").replace(" -inf::", " '-inf'::"))


def first_step_where(
    log: Store, run: str, policy: str, predicate: Predicate, *, as_of: str = "head"
) -> int | None:
    """The first committed step of a policy in a run at which a predicate holds; None where there is none.

    Steps that failed or were abandoned are passed over. Only the log is read, and nothing is run again.

    Args:
        as_of: the cut to look at, as text.

    Raises:
        QueryError: the condition is no SQL condition over a step's columns.
        CutError: no such cut.
        CorruptionError: the log is damaged.
    """
    condition = predicate.condition
    # On lines of its own: a comment in it ends there.
    query = f"SELECT min(step) FROM ({_STEP}) WHERE (\n{condition}\n)"
    with connect_at(log, as_of, run) as connection:
        try:
            if len(duckdb.extract_statements(query)) != 1:
                raise QueryError(f"{condition!r} is no condition: write e.g. gradient_norm > 10 AND kl > 0.1")
            [(step,)] = connection.execute(query, {"run": run, "policy": policy}).fetchall()
        except duckdb.Error as error:
            raise explained(error) from error
    return None if step is None else int(step)
