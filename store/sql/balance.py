"""The token ledger of a store at a cut, from its SQL views.

It has terms, versions, and how dropped samples differ from trained ones: by medians, and by the
two-sample Kolmogorov-Smirnov test, implemented here so that the ledger does not need SciPy for
one p-value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.store.sealed.projections import ONE_VERSION
from rollbook.store.sql.ledger_view import SHARES, TURNS
from rollbook.store.sql.sandbox import Connection

TERMS = ("trained", "dropped", "waiting", "in flight", "kept out")
"""Terms of the ledger; each sampled token is in exactly one."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Distinct turns and their sampled tokens. `rule` is None for all of a term."""

    term: str
    rule: str | None
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class VersionAmounts:
    """Tokens of one policy version; None for both where no version is known."""

    policy: str | None
    policy_version: int | None
    generated: int
    tokens: dict[str, int]
    """Term -> tokens."""

    @property
    def difference(self) -> int:
        """Generated tokens that are in no term."""
        return self.generated - sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Omitted:
    """What a step omitted of a trajectory; `turns` is empty if it omitted all of it."""

    trajectory_id: str
    turns: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class RunLedger:
    """Where a run's sampled tokens went.

    Attributes:
        generated: turns and tokens, counted from the lengths of completions alone.
        length: completion tokens of dropped trajectories compared with trained ones; None if
            there are none of either.
        seconds: time from opening to finish, compared in the same way.
        omitted: what steps should have taken or dropped, but did not.
    """

    run: str
    generated: Amount
    amounts: tuple[Amount, ...]
    versions: tuple[VersionAmounts, ...]
    omitted: tuple[Omitted, ...]
    length: Comparison | None
    seconds: Comparison | None

    def tokens(self, term: str) -> int:
        """Tokens of a whole term."""
        return sum(a.tokens for a in self.amounts if a.term == term and a.rule is None)

    @property
    def difference(self) -> int:
        """Generated tokens that are in no term; the ledger balances if this is 0."""
        return self.generated.tokens - sum(map(self.tokens, TERMS))

    @property
    def balances(self) -> bool:
        """Whether generated is the sum of all terms, in the run and in each version."""
        return self.difference == 0 and all(v.difference == 0 for v in self.versions)


_AMOUNTS = f"""
    SELECT run, term, rule, {TURNS}, CAST(sum(tokens) AS BIGINT)
    FROM ledger_share GROUP BY GROUPING SETS ((run, term), (run, term, rule))
    HAVING grouping(rule) = 1 OR rule IS NOT NULL
    ORDER BY run, term, grouping(rule) DESC, sum(tokens) DESC, rule"""

_GENERATED = """
    SELECT run, CAST(sum(turns) AS BIGINT), CAST(sum(tokens) AS BIGINT)
    FROM internal.amounts GROUP BY run ORDER BY run"""

_VERSIONS = f"""
    WITH made AS (
      SELECT run, policy, policy_version, tokens FROM internal.amounts WHERE one_version
      UNION ALL
      SELECT run, span.policy, span.version, span."end" - span.start
      FROM (SELECT run, unnest(version_spans) AS span FROM internal.several_turns
            WHERE kind = 'turn.completed' AND NOT {ONE_VERSION})
      UNION ALL
      SELECT run, NULL, NULL, len(completion_ids)
             - coalesce(list_sum(list_transform(version_spans, lambda s: s."end" - s.start)), 0)
      FROM internal.several_turns WHERE kind = 'turn.completed' AND NOT {ONE_VERSION}
    ), went AS (
      SELECT run, policy, policy_version, NULL AS term, tokens FROM made
      UNION ALL
      SELECT run, policy, policy_version, term, tokens FROM ledger_share
    )
    SELECT run, policy, policy_version, term, CAST(sum(tokens) AS BIGINT)
    FROM went GROUP BY ALL HAVING sum(tokens) <> 0 ORDER BY run, policy, policy_version, term"""

_ENDED = """
    SELECT s.run, bool_or(s.term = 'trained') AS trained, CAST(sum(s.tokens) AS DOUBLE) AS tokens,
           date_diff('microsecond', any_value(t.opened), any_value(t.finished)) / 1e6 AS seconds
    FROM ledger_share s JOIN internal.trajectory_scalars t USING (trajectory_id)
    WHERE t.finished IS NOT NULL
    GROUP BY s.run, s.trajectory_id HAVING bool_or(s.term IN ('trained', 'dropped'))"""
"""A trajectory counts as trained if any of its tokens was. Its time ends with its finish, not with late
rewards."""


_OMITTED = """
    SELECT run, trajectory_id, list(DISTINCT turn_id ORDER BY turn_id) FILTER (turn_id IS NOT NULL),
           CAST(sum(tokens) AS BIGINT)
    FROM ledger_share WHERE rule = 'omitted' GROUP BY run, trajectory_id ORDER BY run, trajectory_id"""


def read_ledger(connection: Connection) -> list[RunLedger]:
    """The ledger of every run, by name, over a connection of `store.sql.query`."""
    connection.execute(f"CREATE OR REPLACE TEMP TABLE ledger_share AS {SHARES}")
    amounts: dict[str, list[Amount]] = {}
    for run, *amount in connection.execute(_AMOUNTS).fetchall():
        amounts.setdefault(run, []).append(Amount(*amount))
    omitted: dict[str, list[Omitted]] = {}
    for run, trajectory_id, turns, tokens in connection.execute(_OMITTED).fetchall():
        omitted.setdefault(run, []).append(Omitted(trajectory_id, tuple(turns or ()), tokens))
    versions = _versions(connection)
    lengths = _comparisons(connection)
    return [
        RunLedger(
            run,
            Amount("generated", None, turns, tokens),
            tuple(amounts.get(run, ())),
            tuple(versions.get(run, ())),
            tuple(omitted.get(run, ())),
            *lengths.get(run, (None, None)),
        )
        for run, turns, tokens in connection.execute(_GENERATED).fetchall()
    ]


def _versions(connection: Connection) -> dict[str, list[VersionAmounts]]:
    """Run -> its versions, in order, tokens without one last."""
    amounts: dict[tuple[str, str | None, int | None], dict[str | None, int]] = {}
    for run, policy, version, term, tokens in connection.execute(_VERSIONS).fetchall():
        amounts.setdefault((run, policy, version), {})[term] = tokens
    versions: dict[str, list[VersionAmounts]] = {}
    for (run, policy, version), tokens in amounts.items():
        of_terms = {term: tokens.get(term, 0) for term in TERMS}
        versions.setdefault(run, []).append(VersionAmounts(policy, version, tokens.get(None, 0), of_terms))
    return versions


def _comparisons(connection: Connection) -> dict[str, tuple[Comparison, Comparison]]:
    """Run -> dropped against trained trajectories: their tokens and their seconds."""
    columns = connection.execute(_ENDED).fetchnumpy()
    runs, trained = np.asarray(columns["run"]), np.asarray(columns["trained"], np.bool_)
    comparisons = {}
    for run in sorted(set(runs)):
        sides = [(runs == run) & (trained == side) for side in (False, True)]
        if all(side.any() for side in sides):
            tokens, seconds = (
                compare(*(np.asarray(columns[name], np.float64)[side] for side in sides))
                for name in ("tokens", "seconds")
            )
            comparisons[run] = (tokens, seconds)
    return comparisons


Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """How many numbers, their median and 90th percentile."""

    count: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two groups side by side.

    Attributes:
        statistic: largest distance between their empirical distribution functions, 0 to 1.
        p_value: probability of at least that distance if both were drawn from one distribution.
    """

    first: Group
    second: Group
    statistic: float
    p_value: float


def compare(first: Numbers, second: Numbers) -> Comparison:
    """Compare two non-empty groups, float64 [n] and [m]."""
    statistic = ks_statistic(first, second)
    p_value = ks_p_value(statistic, len(first), len(second))
    return Comparison(_group(first), _group(second), statistic, p_value)


def _group(values: Numbers) -> Group:
    median, p90 = np.quantile(values, [0.5, 0.9])
    return Group(len(values), float(median), float(p90))


def ks_statistic(first: Numbers, second: Numbers) -> float:
    """sup over x of |F(x) - G(x)|, for the empirical distribution functions F and G of [n] and [m] numbers.

    Both are steps, so the largest distance is at one of the numbers.
    """
    at = np.concatenate([first, second])
    f = np.searchsorted(np.sort(first), at, side="right") / len(first)
    g = np.searchsorted(np.sort(second), at, side="right") / len(second)
    return float(np.abs(f - g).max())


def ks_p_value(statistic: float, n: int, m: int) -> float:
    """Asymptotic p-value of the two-sided test: Q(D sqrt(nm / (n + m))), where

        Q(x) = 2 sum_{k >= 1} (-1)^(k-1) exp(-2 k^2 x^2)

    is Kolmogorov's distribution (N. Smirnov, Table for estimating the goodness of fit of empirical
    distributions, Ann. Math. Statist. 19, 1948). Ties, as lengths have, make it larger than the exact one.
    """
    x = statistic * math.sqrt(n * m / (n + m))
    if x < 0.2:  # Q is 1 there to 12 digits, and its series is slow
        return 1.0
    terms = [math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return min(1.0, 2 * (sum(terms[::2]) - sum(terms[1::2])))
