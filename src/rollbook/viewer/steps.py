"""A step: what it was planned on, what it computed, its samples by group, and what rules dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any

import orjson

from rollbook.lineage.records import Attempt
from rollbook.lineage.trajectories import places_of
from rollbook.store.errors import RequestError
from rollbook.store.events import StepPlanned
from rollbook.store.sql.relations import AMONG, among
from rollbook.viewer.consumed import compute
from rollbook.viewer.pages import Page, Query, missing, whole_number
from rollbook.viewer.snapshots import Snapshot

ORDERS = ("position", "advantage", "reward", "length", "staleness")
"""By what samples may be listed: by their place in the batch, or by one of the others from the greatest."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step.

    Attributes:
        attempt, status: of the attempt that all this is about: the one that was asked for, or the last.
        version, output_version: that it starts from, and that it made; null unless it committed.
        dropped: rule -> samples that it kept out of the attempt.
        before, after: numbers of the committed steps beside it.
        manifest: all of `step.planned`.
    """

    run: str
    policy: str
    step: int
    attempt: int
    status: str
    attempts: Sequence[Attempt]
    algorithm: str
    phase: str
    cut: str
    version: int
    output_version: int | None
    learning_rate: float
    samples: int
    planned: datetime
    committed: datetime | None
    metrics: Mapping[str, float | None]
    digests: Mapping[str, str]
    dropped: Mapping[str, int]
    before: int | None
    after: int | None
    manifest: Mapping[str, Any]


_ATTEMPTS = """
    SELECT attempt, status, error, algorithm, phase, cut, policy_version, output_version, learning_rate,
           samples, planned, committed, metrics, digests, manifest
    FROM steps WHERE run = $run AND policy = $policy AND step = $step ORDER BY attempt"""
_DROPPED = """
    SELECT rule, count(*) AS samples FROM drops
    WHERE run = $run AND step = $step AND attempt = $attempt AND policy IS NOT DISTINCT FROM $policy
    GROUP BY rule ORDER BY samples DESC, rule"""
_BESIDE = """
    SELECT max(step) FILTER (step < $step) AS before, min(step) FILTER (step > $step) AS after
    FROM steps WHERE run = $run AND policy = $policy AND status = 'committed'"""


def read_step(snapshot: Snapshot, query: Query) -> Step:
    """A step of a policy.

    Raises:
        RequestError: 404, no attempt at it was planned.
    """
    named, rows = _attempts(snapshot, query)
    row = _wanted(rows, query)
    dropped = snapshot.rows(_DROPPED, **named, attempt=row["attempt"])
    beside = snapshot.row(_BESIDE, **named) or {"before": None, "after": None}
    return Step(
        run=named["run"],
        policy=named["policy"],
        step=named["step"],
        attempt=row["attempt"],
        status=row["status"],
        attempts=[Attempt(row["attempt"], row["status"], row["error"]) for row in rows],
        algorithm=row["algorithm"],
        phase=row["phase"],
        cut=row["cut"],
        version=row["policy_version"],
        output_version=row["output_version"],
        learning_rate=row["learning_rate"],
        samples=row["samples"],
        planned=row["planned"],
        committed=row["committed"],
        metrics=orjson.loads(row["metrics"] or "{}"),
        digests=orjson.loads(row["digests"] or "{}"),
        dropped={drop["rule"]: drop["samples"] for drop in dropped},
        before=beside["before"],
        after=beside["after"],
        manifest=orjson.loads(row["manifest"]),
    )


def _attempts(snapshot: Snapshot, query: Query) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What names a step, and the rows of its attempts.

    Raises:
        RequestError: 404, there is none.
    """
    named = {"run": query["run"], "policy": query["policy"], "step": whole_number(query, "step")}
    rows = snapshot.rows(_ATTEMPTS, **named)
    if not rows:
        raise missing(f"step {named['step']} of {named['policy']!r}", "the page of the run lists its steps")
    return named, rows


def _wanted(rows: Sequence[dict[str, Any]], query: Query) -> dict[str, Any]:
    """The attempt that an address names; else the one that committed, or the last."""
    wanted = whole_number(query, "attempt")
    committed = [row for row in rows if row["output_version"] is not None]
    return next((row for row in rows if row["attempt"] == wanted), (committed or rows)[-1])


# Its samples ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A sample of a step's batch.

    Attributes:
        position: its place in the batch, from 0; rank, micro_batch: where that lay.
        turn_id: its leaf, which names it.
        turns: on its path; sampled: tokens that were sampled in them; length: tokens of all of it.
        staleness: versions that its oldest token is behind the step's; null where its version is not known.
        advantage: mean over its trained tokens; null where it cannot be computed without a model.
    """

    position: int
    rank: int
    micro_batch: int
    trajectory_id: str
    trajectory: str | None
    turn_id: str
    group: str | None
    reward: float | None
    turns: int
    sampled: int
    length: int | None
    staleness: int | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Samples that were compared with each other; `flat`: all their rewards are equal."""

    group: str | None
    samples: Sequence[SampleLine]
    reward: float | None
    flat: bool


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step, by group.

    Attributes:
        proven: whether the advantages' digest is the step's own; null where they were not computed, for the
            reason that `why` says.
    """

    run: str
    policy: str
    step: int
    order: str
    orders: Sequence[str]
    groups: Sequence[GroupLine]
    proven: bool | None
    why: str


_TRAJECTORIES = f"""
    SELECT trajectory_id, trajectory, "group", reward FROM trajectories
    WHERE {AMONG}"""
_TURNS = f"""
    SELECT turn_id, parent_turn_id, prompt_length, completion_length, min_version FROM internal.turn_scalars
    WHERE completed IS NOT NULL AND {AMONG}"""


def read_samples(snapshot: Snapshot, query: Query) -> Samples:
    """The samples of a step."""
    named, rows = _attempts(snapshot, query)
    row = _wanted(rows, query)
    order = query.get("by") or ORDERS[0]
    if order not in ORDERS:
        raise RequestError(400, "bad_query", f"by={order[:40]!r}: use {', '.join(ORDERS)}")
    plan = _plan(snapshot, named, row["attempt"])
    computed = compute(snapshot, named["run"], plan, orjson.loads(row["digests"] or "{}"))
    lines = _lines(snapshot, plan, computed.means())
    by_group: dict[Any, list[SampleLine]] = {}
    for line in lines:
        by_group.setdefault(line.group or line.trajectory_id, []).append(line)
    groups = [_group(members, order) for members in by_group.values()]
    groups.sort(key=lambda group: _rank(group.samples[0], order))
    return Samples(
        named["run"], named["policy"], named["step"], order, ORDERS, groups, computed.proven, computed.why
    )


def _plan(snapshot: Snapshot, named: Mapping[str, Any], attempt: int) -> StepPlanned:
    where = "kind = 'step.planned' AND run = $run AND policy = $policy AND step = $step"
    plans = (event.record for event in snapshot.events(where, **named))
    return next(plan for plan in plans if isinstance(plan, StepPlanned) and plan.attempt == attempt)


def _group(members: list[SampleLine], order: str) -> GroupLine:
    rewards = [member.reward for member in members if member.reward is not None]
    return GroupLine(
        members[0].group,
        sorted(members, key=lambda line: _rank(line, order)),
        fmean(rewards) if rewards else None,
        len(rewards) > 1 and len(set(rewards)) == 1,
    )


def _rank(line: SampleLine, order: str) -> tuple[bool, float]:
    value = getattr(line, order)
    return value is None, (value if order == ORDERS[0] else -(value or 0))


def _lines(snapshot: Snapshot, plan: StepPlanned, advantages: Sequence[float | None]) -> list[SampleLine]:
    ids = {ref["trajectory_id"] for ref in plan.samples}
    trajectories = {row["trajectory_id"]: row for row in snapshot.rows(_TRAJECTORIES, **among(ids))}
    turns = {row["turn_id"]: row for row in snapshot.rows(_TURNS, **among(ids))}
    places = places_of(plan.partition)
    lines = []
    for position, ref in enumerate(plan.samples):
        path, node = [], turns.get(ref["turn_id"])
        while node is not None:
            path.append(node)
            node = turns.get(node["parent_turn_id"])
        trajectory = trajectories.get(ref["trajectory_id"], {})
        oldest = min((turn["min_version"] for turn in path if turn["min_version"] is not None), default=None)
        lines.append(
            SampleLine(
                position,
                *places.get(position, (0, 0)),
                ref["trajectory_id"],
                trajectory.get("trajectory"),
                ref["turn_id"],
                trajectory.get("group"),
                trajectory.get("reward"),
                len(path),
                sum(turn["completion_length"] for turn in path),
                path[0]["prompt_length"] + path[0]["completion_length"] if path else None,
                None if oldest is None else plan.policy_version - oldest,
                advantages[position] if advantages else None,
            )
        )
    return lines


PAGES = (
    Page("/runs/{run}/steps/{policy}/{step}", "step.html", read_step),
    Page("/runs/{run}/steps/{policy}/{step}/samples", "step_samples.html", read_samples),
)
