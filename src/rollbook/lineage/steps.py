"""The lineage of an optimizer step, and of a policy version."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.lineage.line import Lines
from rollbook.lineage.records import (
    Attempt,
    Consumer,
    PolicyLineage,
    RequestPosition,
    SampledBy,
    SampledTotals,
    StepLineage,
    StepSample,
)
from rollbook.lineage.trajectories import places_of
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json
from rollbook.store.sealed.projections import ONE_VERSION
from rollbook.store.sql.relations import AMONG, among
from rollbook.store.sql.sandbox import Connection

_Maker = tuple[str, str, int]
"""(run, policy, version)"""
_ATTEMPTS = """
    SELECT run, attempt, status, error, policy_version, output_version, cut, manifest FROM steps
    WHERE step = $step AND policy = $policy AND ($run IS NULL OR run = $run) ORDER BY run, attempt"""
_VERSIONS = """
    SELECT DISTINCT run FROM (
        SELECT run FROM policies WHERE policy = $policy AND policy_version = $version
        UNION ALL SELECT run FROM steps WHERE policy = $policy AND output_version = $version
        UNION ALL SELECT run FROM internal.turn_scalars
                  WHERE policy = $policy AND $version BETWEEN min_version AND max_version)
    WHERE $run IS NULL OR run = $run ORDER BY run"""
_TURNS = f"""
    SELECT turn_id, lane, seq, run, parent_turn_id, completion_length, policy, policy_version, one_version,
           min_version, max_version
    FROM internal.turn_scalars
    WHERE completed IS NOT NULL AND {AMONG}"""
_NAMES = f"""
    SELECT trajectory_id, trajectory FROM internal.trajectory_scalars
    WHERE {AMONG}"""
_SPANS = f"""
    SELECT turn_id, span.policy, span.version, span."end" - span.start AS tokens
    FROM (SELECT turn_id, unnest(version_spans) AS span FROM internal.several_turns
          WHERE kind = 'turn.completed' AND NOT {ONE_VERSION}
            AND {AMONG})"""
_DROPS = """
    SELECT rule, count(*) FROM drops
    WHERE run = $run AND policy = $policy AND step = $step AND attempt = $attempt
    GROUP BY rule ORDER BY rule"""

_MADE = f"""
    made AS MATERIALIZED (
      SELECT trajectory_id, turn_id, completion_length AS tokens FROM internal.turn_scalars
      WHERE run = $run AND policy = $policy AND policy_version = $version AND one_version
        AND completed IS NOT NULL
      UNION ALL
      SELECT trajectory_id, turn_id, sum(span."end" - span.start)
      FROM (SELECT trajectory_id, turn_id, unnest(version_spans) AS span FROM internal.several_turns
            WHERE kind = 'turn.completed' AND run = $run AND NOT {ONE_VERSION})
      WHERE span.policy = $policy AND span.version = $version GROUP BY trajectory_id, turn_id
    )"""
"""The turns of which a version sampled tokens, and how many."""
_SAMPLED = f"""
    WITH {_MADE}
    SELECT count(DISTINCT trajectory_id), count(*), coalesce(sum(tokens), 0)::BIGINT FROM made"""
_CONSUMERS = f"""
    WITH RECURSIVE {_MADE}, ref AS MATERIALIZED (
      SELECT run, policy, step, trajectory_id, turn_id FROM samples SEMI JOIN made USING (trajectory_id)
      WHERE status = 'committed'
    ), near AS MATERIALIZED (
      SELECT trajectory_id, turn_id, parent_turn_id FROM internal.turn_scalars
      SEMI JOIN ref USING (trajectory_id) WHERE parent_turn_id IS NOT NULL
    ), walk AS (
      SELECT * FROM ref
      UNION
      SELECT w.run, w.policy, w.step, w.trajectory_id, n.parent_turn_id
      FROM walk w JOIN near n ON n.trajectory_id = w.trajectory_id AND n.turn_id = w.turn_id
    ), consumed AS (
      SELECT w.run, w.policy, w.step, count(DISTINCT w.trajectory_id) AS trajectories, count(*) AS turns,
             sum(tokens)::BIGINT AS tokens
      FROM walk w JOIN made m ON m.trajectory_id = w.trajectory_id AND m.turn_id = w.turn_id GROUP BY ALL
    )
    SELECT run, policy, step, output_version, trajectories, turns, tokens
    FROM consumed JOIN (SELECT run, policy, step, output_version FROM steps WHERE status = 'committed')
    USING (run, policy, step) ORDER BY run, policy, step"""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A row of `_ATTEMPTS`."""

    run: str
    attempt: int
    status: str
    error: str | None
    input_version: int
    output_version: int | None
    cut: str
    manifest: str


def step_lineage(connection: Connection, step: int, run: str | None, policy: str) -> StepLineage:
    """Where a step's batch comes from, and what the version that it made led to.

    Raises:
        ReplayError: no run planned such a step of the policy, or several did.
    """
    parameters = {"step": step, "run": run, "policy": policy}
    attempts = [_Planned(*row) for row in connection.execute(_ATTEMPTS, parameters).fetchall()]
    run = _only(
        [attempt.run for attempt in attempts],
        f"step {step} of policy {policy!r}",
        run,
        "select run, policy, step, status from steps",
    )
    final = next((attempt for attempt in attempts[::-1] if attempt.output_version is not None), attempts[-1])
    manifest = orjson.loads(final.manifest)
    lines = Lines.over(connection)
    line = lines.line(run, policy)
    samples, sampled_by = _batch(connection, manifest, lines)
    output = None if final.output_version is None else line.version(final.output_version)
    named = {"run": run, "policy": policy}
    dropped = connection.execute(_DROPS, named | {"step": step, "attempt": final.attempt}).fetchall()
    return StepLineage(
        run=run,
        policy=policy,
        step=step,
        attempt=final.attempt,
        status=final.status,
        attempts=tuple(Attempt(attempt.attempt, attempt.status, attempt.error) for attempt in attempts),
        cut=final.cut,
        input=line.version(final.input_version),
        samples=samples,
        sampled_by=sampled_by,
        drops=dict(dropped),
        output=output,
        sampled=None if output is None else _sampled(connection, run, policy, output.version),
        consumers=() if output is None else _consumers(connection, run, policy, output.version),
        descendants=() if output is None else line.descendants([output.version]),
    )


def policy_lineage(connection: Connection, version: int, run: str | None, policy: str) -> PolicyLineage:
    """Where a policy version comes from, and what it led to.

    Raises:
        ReplayError: no run has such a version of the policy, or several have.
    """
    parameters = {"version": version, "run": run, "policy": policy}
    runs = [name for (name,) in connection.execute(_VERSIONS, parameters).fetchall()]
    what = f"version {version} of policy {policy!r}"
    run = _only(runs, what, run, "select run, policy, policy_version from policies")
    line = Lines.over(connection).line(run, policy)
    return PolicyLineage(
        version=line.version(version),
        back=line.back(version),
        sampled=_sampled(connection, run, policy, version),
        consumers=_consumers(connection, run, policy, version),
        descendants=line.descendants([version]),
    )


def _only(runs: Iterable[str], what: str, run: str | None, listing: str) -> str:
    """The one run among these."""
    unique = sorted(set(runs))
    if not unique:
        where = "this store" if run is None else f"run {run!r}"
        raise ReplayError(f'{where} has no {what}; list them: rollbook sql "{listing}"')
    if len(unique) > 1:
        raise ReplayError(f"runs {', '.join(unique)} each have a {what}: name one with --run")
    return unique[0]


def _sampled(connection: Connection, run: str, policy: str, version: int) -> SampledTotals:
    parameters = {"run": run, "policy": policy, "version": version}
    [row] = connection.execute(_SAMPLED, parameters).fetchall()
    return SampledTotals(*row)


def _consumers(connection: Connection, run: str, policy: str, version: int) -> tuple[Consumer, ...]:
    parameters = {"run": run, "policy": policy, "version": version}
    return tuple(Consumer(*row) for row in connection.execute(_CONSUMERS, parameters).fetchall())


# The batch ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """A row of `_TURNS`."""

    turn_id: str
    lane: str
    seq: int
    run: str
    parent: str | None
    tokens: int
    policy: str | None
    version: int | None
    one_version: bool
    min_version: int | None
    max_version: int | None


def _batch(
    connection: Connection, manifest: Json, lines: Lines
) -> tuple[tuple[StepSample, ...], tuple[SampledBy, ...]]:
    """The samples that a manifest names, in order, and which versions sampled their tokens."""
    ids = among(ref["trajectory_id"] for ref in manifest["samples"])

    def rows(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query, ids).fetchall()

    turns, names = {row[0]: _Turn(*row) for row in rows(_TURNS)}, dict(rows(_NAMES))
    places = places_of(manifest["partition"])
    samples, seen = [], dict[str, _Turn]()
    for position, ref in enumerate(manifest["samples"]):
        path = list(_path(ref["turn_id"], turns))[::-1]
        seen |= {turn.turn_id: turn for turn in path}
        samples.append(
            StepSample(
                *(position, *places[position], ref["trajectory_id"], names.get(ref["trajectory_id"])),
                ref["turn_id"],
                tuple(RequestPosition(turn.turn_id, turn.lane, turn.seq) for turn in path),
                sum(turn.tokens for turn in path),
                min((turn.min_version for turn in path if turn.min_version is not None), default=None),
                max((turn.max_version for turn in path if turn.max_version is not None), default=None),
            )
        )
    mixed = any(not turn.one_version for turn in seen.values())
    return tuple(samples), _makers(seen.values(), rows(_SPANS) if mixed else [], lines)


def _path(leaf: str, turns: Mapping[str, _Turn]) -> Iterator[_Turn]:
    """The turns of a sample, the leaf first."""
    node = turns.get(leaf)
    while node is not None:
        yield node
        node = None if node.parent is None else turns.get(node.parent)


def _makers(turns: Iterable[_Turn], spans: Sequence[tuple[Any, ...]], lines: Lines) -> tuple[SampledBy, ...]:
    """Which versions sampled the tokens of turns.

    Args:
        spans: (turn, policy, version, tokens) of turns of several versions.
    """
    of_turn: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    for turn_id, policy, version, count in spans:
        of_turn[turn_id][policy, version] += count
    tokens, counts = Counter[_Maker](), Counter[_Maker]()
    unknown, unknown_turns = 0, 0
    for turn in turns:
        shares = of_turn[turn.turn_id]
        if turn.one_version and turn.policy is not None and turn.version is not None:
            shares = Counter({(turn.policy, turn.version): turn.tokens})
        for (policy, version), count in shares.items():
            tokens[turn.run, policy, version] += count
            counts[turn.run, policy, version] += 1
        left = turn.tokens - shares.total()
        unknown, unknown_turns = unknown + left, unknown_turns + bool(left)
    sampled_by = [SampledBy(lines.version(*maker), counts[maker], tokens[maker]) for maker in sorted(tokens)]
    return tuple(sampled_by + [SampledBy(None, unknown_turns, unknown)] * bool(unknown))
