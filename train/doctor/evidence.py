"""The input of a diagnosis and its findings: the course of a training, read from its log.

The queries are shown with a diagnosis as its evidence, so that whoever runs one sees the same
numbers. A policy may have had several trainings one after the other, such as imitation and then
reinforcement: the course is that of the newest, since a change from one to the next is no sign
of failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import Any

from rollbook.store.events import Json
from rollbook.store.sql.sandbox import Connection
from rollbook.store.sql.training_views import RECORDED

FEWEST = 10
"""Steps below which nothing is said about a course."""
Row = Mapping[str, float | None]
"""Metric -> its value in a step; None where the step has none."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The mean reward of a version's held-out trajectories, and the variance of that mean."""

    mean: float
    variance: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns that ended in one way since a training began: how many, in which lane, with which
    error."""

    status: str
    lane: str
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of agents that ended since a training began: their rollouts, their number, and, of
    those that failed by their infrastructure, the reason."""

    rollout: str
    by_infrastructure: bool
    why: str
    count: int


@dataclass(frozen=True, slots=True)
class TrainingCourse:
    """What a training did: its steps' metrics in order, and what happened beside them.

    Attributes:
        training: which one.
        rows: of committed steps.
        numbers: of these steps.
        held_out: version -> reward of evaluations; held_out_losses: version -> loss of held-out samples.
        dropped: rule -> samples that it dropped; used: samples that steps consumed.
        failed: step -> error, of attempts that failed; syncs: version and error of syncs that failed.
        partial: version -> trajectories of its evaluation, and how many there were to be, if it is not whole;
            it has no `held_out`.
        turns: those that ended since it began, the most frequent first; launches: likewise.
    """

    training: Training
    rows: Sequence[Row]
    numbers: Sequence[int]
    held_out: Mapping[int, HeldOut]
    dropped: Mapping[str, int]
    used: int
    failed: Mapping[int, str]
    syncs: Sequence[tuple[int, str]]
    held_out_losses: Mapping[int, float] = field(default_factory=dict)
    partial: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    turns: Sequence[Turns] = ()
    launches: Sequence[Launches] = ()

    def values(self, metric: str) -> list[float]:
        """A metric of the steps that have it."""
        return [value for row in self.rows if (value := row.get(metric)) is not None]

    def whole(self) -> tuple[int, int] | None:
        """Its first and last step; None if it has none."""
        return (self.numbers[0], self.numbers[-1]) if self.numbers else None

    def ends(self, metric: str) -> tuple[float, float] | None:
        """The mean of a metric over the first and over the last tenth of the steps that have it;
        None if they are too few."""
        values = self.values(metric)
        if len(values) < FEWEST:
            return None
        size = max(len(values) // 10, 3)
        return fmean(values[:size]), fmean(values[-size:])


@dataclass(frozen=True, slots=True)
class Finding:
    """A failure of which there are signs.

    Attributes:
        name: of the failure; said: what was seen, with its numbers.
        steps: first and last step in which it was seen; None where it is not about steps.
        evidence: the numbers; sql: a query that shows them.
        levers: settings that act on it.
    """

    name: str
    said: str
    steps: tuple[int, int] | None
    evidence: Json
    sql: str
    levers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """The newest training of a policy in a run: it began with this step, from this version.

    Attributes:
        began: when its first step was planned; None: none was. It is a literal of queries over all turns:
            where DuckDB has to find it first, it reads everything that there is of each.
    """

    run: str
    policy: str
    step: int = 0
    version: int = 0
    began: datetime | None = None

    @property
    def of(self) -> str:
        """An SQL condition that selects the policy."""
        return f"run = {literal(self.run)} AND policy = {literal(self.policy)}"

    @property
    def _committed(self) -> str:
        return f"{self.of} AND status = 'committed' AND step >= {self.step}"

    def _since(self, column: str) -> str:
        return "false" if self.began is None else f"{column} >= TIMESTAMP '{self.began}'"

    def metrics(self, *names: str) -> str:
        """Metrics of its committed steps."""
        return f"SELECT step, {', '.join(names)} FROM metrics WHERE {self._committed} ORDER BY step"

    def held_out(self) -> str:
        """The held-out rewards of each version whose evaluation is whole; the deviation is over all
        of them."""
        return (
            "SELECT max_version AS version, avg(reward) AS reward, count(*) AS trajectories, "
            "any_value(deviation) AS deviation "
            "FROM (SELECT *, coalesce(stddev_samp(reward) OVER (), 0) AS deviation FROM trajectories "
            f"WHERE run = {literal(self.run)} AND split = 'eval' AND reward IS NOT NULL "
            f"AND max_version >= {self.version} AND max_version NOT IN "
            f"(SELECT policy_version FROM ({self.partial_evaluations()}))) "
            "GROUP BY max_version ORDER BY version"
        )

    def losses(self) -> str:
        """The loss of held-out samples for each version."""
        return (
            "SELECT policy_version, arg_max(loss, time) AS loss FROM evaluations "
            f"WHERE {self.of} AND loss IS NOT NULL AND policy_version >= {self.version} "
            "GROUP BY policy_version ORDER BY policy_version"
        )

    def partial_evaluations(self) -> str:
        """The evaluations that are not whole, unless a later one of their version is."""
        return (
            "SELECT policy_version, arg_max(trajectories, time) AS trajectories, "
            f"arg_max(expected, time) AS expected FROM evaluations WHERE {self.of} "
            f"AND policy_version >= {self.version} "
            "GROUP BY policy_version HAVING arg_max(coalesce(whole, true), time) = false"
        )

    def drops(self) -> str:
        """How many samples each rule dropped."""
        return (
            f"SELECT rule, count(*) AS samples FROM drops WHERE {self._dropped} GROUP BY rule ORDER BY rule"
        )

    def dropped_and_used(self, rule: str) -> str:
        """How many samples a rule dropped, and how many steps used."""
        return (
            f"SELECT {self._count(rule)} AS {rule}, coalesce(sum(samples), 0)::BIGINT AS used "
            f"FROM metrics WHERE {self._committed}"
        )

    def without_gradient(self) -> str:
        """How many steps had no gradient, and how many samples were dropped for equal rewards."""
        return (
            "SELECT count(gradient_norm) AS steps, count(*) FILTER (gradient_norm = 0) AS without_gradient, "
            f"{self._count('zero_variance')} AS zero_variance, coalesce(sum(samples), 0)::BIGINT AS used "
            f"FROM metrics WHERE {self._committed}"
        )

    @property
    def _dropped(self) -> str:
        return f"run = {literal(self.run)} AND step >= {self.step}"

    def _count(self, rule: str) -> str:
        return f"(SELECT count(*) FROM drops WHERE {self._dropped} AND rule = {literal(rule)})"

    def failed_steps(self) -> str:
        """The last error of each step that had failed attempts."""
        return (
            f"SELECT step, arg_max(error, attempt) AS error FROM steps WHERE {self.of} "
            f"AND status = 'failed' AND step >= {self.step} GROUP BY step ORDER BY step"
        )

    def failed_syncs(self) -> str:
        """The transfers of weights that failed."""
        return (
            f"SELECT policy_version, engine, coalesce(error, '') AS error FROM syncs WHERE {self.of} "
            f"AND status = 'failed' AND policy_version >= {self.version} ORDER BY started"
        )

    def ended_turns(self) -> str:
        """How many turns completed and failed since it began, by the lane of the proxy and by the error."""
        return (
            "SELECT status, lane, coalesce(error, '') AS error, count(*) AS turns FROM turns "
            f"WHERE run = {literal(self.run)} AND status <> 'running' AND {self._since('requested')} "
            "GROUP BY ALL ORDER BY status DESC, turns DESC, lane, error"
        )

    def ended_launches(self) -> str:
        """How many launches ended since it began, by rollouts; and why their infrastructure failed."""
        return (
            "SELECT rollout, status = 'infra_error' AS by_infrastructure, "
            "if(status = 'infra_error', coalesce(why, ''), '') AS why, count(*) AS launches FROM launches "
            f"WHERE run = {literal(self.run)} AND status NOT IN ('running', 'cancelled') "
            f"AND {self._since('ended')} "
            "GROUP BY ALL ORDER BY by_infrastructure DESC, launches DESC, rollout, why"
        )


def literal(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def read_course(connection: Connection, run: str, policy: str) -> TrainingCourse:
    """What the newest training of a policy in a run did, over a connection of `store.sql.query`.

    Raises:
        duckdb.Error: a file is damaged.
    """

    def rows(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query).fetchall()

    training = _newest(connection, run, policy)
    steps = rows(training.metrics(*_METRICS))
    return TrainingCourse(
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
    WITH known AS (
        SELECT step, policy_version, split_part(phase, '#', 1) AS training, status, planned
        FROM steps WHERE run = $run AND policy = $policy
    ), done AS (
        SELECT step, policy_version, training FROM known WHERE status = 'committed'
    ), newest AS (
        SELECT * FROM done WHERE step > (
            SELECT coalesce(max(step), -1) FROM done
            WHERE training <> (SELECT arg_max(training, step) FROM done)
        )
    )
    SELECT coalesce(min(step), 0), coalesce(min(policy_version), 0),
           (SELECT min(planned) FROM known WHERE known.step >= (SELECT coalesce(min(step), 0) FROM newest))
    FROM newest"""
"""The first step of the newest training, the version that it starts from, and when it or a later one was
first planned."""


def _newest(connection: Connection, run: str, policy: str) -> Training:
    [(step, version, began)] = connection.execute(_NEWEST, {"run": run, "policy": policy}).fetchall()
    return Training(run, policy, step, version, began)
