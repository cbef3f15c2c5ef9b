"""Finds the first step of a training that differs when it is run again, or at which a condition holds
by what the log recorded of it.

Once code, settings or the machine changed, every later step differs when it is run by itself. So
the steps that follow checkpoints are bisected, and then those between two checkpoints run in order:
with n checkpoints that are m steps apart, at most 1 + log2(n) + m steps are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import duckdb

from rollbook.replay.step.run_log import RunLog
from rollbook.replay.stretch.stretch import Break, chain, prove_segment, segments
from rollbook.replay.verdict import StepReplay
from rollbook.store.errors import QueryError, ReplayError
from rollbook.store.fold.history import History
from rollbook.store.log.store import Store
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import explained
from rollbook.store.sql.training_views import METRICS


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The result of a search.

    Attributes:
        broken: where the chain of recorded digests does not hold, which is seen without running a step.
        ran: steps that were run, in this order.
        first: the first step that differs; None where none of those that were run does.
    """

    run: str
    policy: str
    broken: list[Break]
    ran: list[int]
    first: StepReplay | None


def find_first_bad(
    log: Store,
    history: History,
    first: int,
    last: int,
    *,
    trust_parts: bool = False,
    ran: Callable[[int], None] = lambda step: None,
) -> FirstBad:
    """Find the first step of a stretch that differs, where all that follow it differ too.

    Args:
        ran: called with each step that is run.

    Raises:
        ReplayError: the run has no step there, or one that is needed cannot be replayed.
    """
    parts = segments(history, first, last)
    if not parts:
        raise ReplayError(f"run {history.run!r} has no committed step from {first} to {last}")
    broken, order = chain(history, [n for part in parts for n in part]), list[int]()
    run_log = RunLog(log, history)

    def replays(steps: Sequence[int]) -> StepReplay | None:
        """The first of these steps that differs."""
        for verified in prove_segment(run_log, steps, trust_parts=trust_parts):
            if verified.replay is None:
                raise ReplayError(f"step {verified.step} cannot be replayed: {verified.why}")
            order.extend(n for n in verified.replay.reran if n not in order)
            ran(verified.step)
            if not verified.replay.equal:
                return verified.replay
        return None

    good, bad = 0, len(parts)  # the first steps of parts before `good` are good, of `bad` and after bad
    first_bad: StepReplay | None = None
    while good < bad:
        middle = (good + bad) // 2
        if (differs := replays(parts[middle][:1])) is None:
            good = middle + 1
        else:
            first_bad, bad = differs, middle
    if good > 0 and (within := replays(parts[good - 1])) is not None:
        first_bad = within
    return FirstBad(history.run, history.policy, broken, order, first_bad)


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

    What a step did not record is null there, and so is what was no number; no comparison with null
    holds.
    """

    condition: str


def threshold(metric: str, *, above: float | None = None, below: float | None = None) -> Predicate:
    """The condition that a metric is above a bound, or below one; with both, outside of what lies between
    them.

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
