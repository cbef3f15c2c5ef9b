"""Two runs, versions or steps side by side, and a step beside what another rule makes of its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rollbook.replay.what_if.side_by_side import Differences, SampleSides, Side, differences, sample_sides
from rollbook.store.errors import RequestError, RollbookError
from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.experience import Experience, Scores
from rollbook.train.batches.manifest_batch import experience_at, samples_at_cut
from rollbook.viewer.consumed import OF_MODELS, committed_step, compute
from rollbook.viewer.pages import Page, Query, whole_number
from rollbook.viewer.runs import read_runs
from rollbook.viewer.snapshots import Snapshot

LISTED = 200
"""Tasks, or differing keys, that a page lists."""


# Two runs, or two stretches of versions, on the same tasks ----------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task, or a group where trajectories name no task, as both sides did it; null: one did not.

    Attributes:
        left, right: mean reward; trajectories: how many each had.
        difference: right less left.
    """

    task: str
    left: float | None
    right: float | None
    trajectories: tuple[int, int]
    difference: float | None


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """The rewards of two sides on the same tasks, those that differ most first.

    Attributes:
        sides: run, first and last version of each; versions are of a trajectory's newest turn.
        shared: tasks that both did; alone: that only the left did, and only the right.
        means: over the shared tasks, of each side.
        difference: mean of their differences; interval: its 95 % interval, null of fewer than two.
    """

    sides: Sequence[Mapping[str, Any]]
    split: str
    runs: Sequence[str]
    policies: Sequence[Sequence[str]]
    shared: int
    alone: tuple[int, int]
    means: tuple[float | None, float | None]
    difference: float | None
    interval: tuple[float, float] | None
    tasks: Sequence[TaskLine]


_TASKS = """
    WITH chosen AS (
      SELECT coalesce(task, "group") AS task, reward, run, max_version FROM trajectories
      WHERE run IN ($left, $right) AND split = $split AND reward IS NOT NULL AND status <> 'open'
        AND coalesce(task, "group") IS NOT NULL
    ), a AS (
      SELECT task, avg(reward) AS mean, count(*) AS n FROM chosen
      WHERE run = $left AND coalesce(max_version, 0) BETWEEN $left_first AND $left_last GROUP BY task
    ), b AS (
      SELECT task, avg(reward) AS mean, count(*) AS n FROM chosen
      WHERE run = $right AND coalesce(max_version, 0) BETWEEN $right_first AND $right_last GROUP BY task
    )
    SELECT task, a.mean AS left_mean, b.mean AS right_mean,
           coalesce(a.n, 0) AS left_n, coalesce(b.n, 0) AS right_n
    FROM a FULL JOIN b USING (task)
    ORDER BY abs(b.mean - a.mean) DESC NULLS LAST, task"""


def read_tasks(snapshot: Snapshot, query: Query) -> TaskComparison:
    """Two sides on the same tasks; without versions, whole runs.

    Raises:
        RequestError: 400, a version is no number.
    """
    lines = read_runs(snapshot, {}).runs
    runs = [line.run for line in lines]
    policies = {line.run: [policy.policy for policy in line.policies] for line in lines}
    newest = runs[0] if runs else ""
    sides: list[dict[str, Any]] = []
    for side in ("left", "right"):
        first = whole_number(query, f"{side}_first", 0)
        last = whole_number(query, f"{side}_last", 2**53)
        sides.append({"run": query.get(side) or newest, "first": first, "last": last})
    split = query.get("split") or "train"
    parameters = {
        name: side[key]
        for which, side in zip(("left", "right"), sides, strict=True)
        for name, key in ((which, "run"), (f"{which}_first", "first"), (f"{which}_last", "last"))
    }
    rows = snapshot.rows(_TASKS, **parameters, split=split)
    both = [row for row in rows if row["left_n"] and row["right_n"]]
    gaps = np.array([row["right_mean"] - row["left_mean"] for row in both], np.float64)
    means = [
        float(np.mean([row[f"{which}_mean"] for row in both])) if both else None
        for which in ("left", "right")
    ]
    return TaskComparison(
        sides,
        split,
        runs,
        [policies.get(side["run"], []) for side in sides],
        len(both),
        (sum(not row["right_n"] for row in rows), sum(not row["left_n"] for row in rows)),
        (means[0], means[1]),
        float(gaps.mean()) if len(gaps) else None,
        interval_of(gaps),
        [_task_line(row) for row in rows[:LISTED]],
    )


def _task_line(row: Mapping[str, Any]) -> TaskLine:
    left, right = row["left_mean"], row["right_mean"]
    gap = None if left is None or right is None else right - left
    return TaskLine(row["task"], left, right, (row["left_n"], row["right_n"]), gap)


def interval_of(differences: np.ndarray[Any, Any]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of paired differences [N], by its standard error (Miller, Adding Error
    Bars to Evals, 2024, section 4); None of fewer than two."""
    if len(differences) < 2:
        return None
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return mean - 1.96 * error, mean + 1.96 * error


# Two steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key of two manifests that has another value in each; null: one does not have it."""

    key: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class StepName:
    """A committed step of a policy in a run."""

    run: str
    policy: str
    step: int


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Two committed steps.

    Attributes:
        settings: keys of their manifests that differ: recipe, algorithm, optimizer, environment and the rest.
        more: keys beyond those that are listed.
        metrics: name -> (left, right).
        digests: stage of the left -> whether the right has the same.
        shared: samples that both consumed; alone: that only the left did, and only the right.
    """

    left: StepName
    right: StepName
    settings: Sequence[KeyLine]
    more: int
    metrics: Mapping[str, tuple[float | None, float | None]]
    digests: Mapping[str, bool]
    shared: int
    alone: tuple[int, int]


BESIDES = frozenset(
    (
        *("samples", "partition", "others", "rollout_batch", "cut", "step", "attempt", "seed"),
        *("policy_version", "input_digests"),
    )
)
"""Of a manifest: what any two steps differ in."""


def read_steps_compared(snapshot: Snapshot, query: Query) -> StepComparison:
    """Two steps of the same run and policy, or of others.

    Raises:
        RequestError: 404, one was not committed.
    """
    names = [_step_named(query, side) for side in ("left", "right")]
    (plan, done), (other_plan, other_done) = [
        committed_step(snapshot, name.run, name.policy, name.step) for name in names
    ]
    keys = [_flat(_settings(p)) for p in (plan, other_plan)]
    settings = [
        KeyLine(key, keys[0].get(key), keys[1].get(key))
        for key in sorted(keys[0].keys() | keys[1].keys())
        if key != "schedule.number" and keys[0].get(key) != keys[1].get(key)
    ]
    numbers = [{k: v for k, v in d.metrics.items() if isinstance(v, int | float)} for d in (done, other_done)]
    samples = [{ref["turn_id"] for ref in p.samples} for p in (plan, other_plan)]
    return StepComparison(
        names[0],
        names[1],
        settings[:LISTED],
        max(len(settings) - LISTED, 0),
        {name: (numbers[0].get(name), numbers[1].get(name)) for name in sorted({*numbers[0], *numbers[1]})},
        {stage: done.digests[stage] == other_done.digests.get(stage) for stage in done.digests},
        len(samples[0] & samples[1]),
        (len(samples[0] - samples[1]), len(samples[1] - samples[0])),
    )


def _step_named(query: Query, side: str) -> StepName:
    """`RUN/POLICY/STEP`, as in the address of a step's page without `steps`.

    Raises:
        RequestError: 400, it is not of that form.
    """
    parts = query.get(side, "").rsplit("/", 2)
    if len(parts) < 3 or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 16):
        raise RequestError(400, "bad_query", f"{side}={query.get(side, '')[:80]!r}: give RUN/POLICY/STEP")
    return StepName(parts[0], parts[1], int(parts[2]))


def _settings(plan: StepPlanned) -> Json:
    return {name: getattr(plan, name) for name in plan.__slots__ if name not in BESIDES}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Objects within objects as one, by paths with dots; lists as their JSON."""
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for name, inner in value.items():
            flat |= _flat(inner, f"{path}.{name}" if path else name)
        return flat
    if value is None or isinstance(value, str | int | float | bool):
        return {path: value}
    return {path: orjson.dumps(value, default=str).decode()}


# A step beside its what-if ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WhatIfPage:
    """The samples of a step with the advantages that they had, and those that another rule gives them.

    Attributes:
        changes: `table.key=value` each.
        why: there is no other side; empty where there is one.
    """

    step: StepName
    changes: str
    samples: Sequence[SampleSides]
    advantages: Differences | None
    proven: bool | None
    why: str


def read_what_if(snapshot: Snapshot, query: Query) -> WhatIfPage:
    """What `rollbook replay what-if` shows of advantages: of the same samples, from the log alone.

    Raises:
        RequestError: 404, the step was not committed.
    """
    number = whole_number(query, "step") or 0
    name = StepName(query["run"], query["policy"], number)
    plan, committed = committed_step(snapshot, name.run, name.policy, name.step)
    computed = compute(snapshot, name.run, plan, committed.digests)
    changes = query.get("set", "").strip()
    if computed.experience is None:
        return WhatIfPage(name, changes, (), None, None, computed.why)
    try:
        other = _other_experience(snapshot, name.run, plan, changes.split())
    except RollbookError as error:
        return WhatIfPage(name, changes, (), None, computed.proven, str(error))
    leaves = frozenset(sample.leaf_turn_id for sample in computed.experience.samples)
    samples = sample_sides(Side(computed.experience, leaves, {}), Side(other, leaves, {}))
    return WhatIfPage(name, changes, samples, differences(samples, "advantage"), computed.proven, "")


def _other_experience(snapshot: Snapshot, run: str, plan: StepPlanned, changes: Sequence[str]) -> Experience:
    """The experience that other settings make of a step's samples.

    Raises:
        ConfigError: a key is unknown, or the keys do not go together.
        ReplayError: the other algorithm needs what a model computes, or was given no such step.
    """
    # It knows every algorithm and its settings, which takes half a second that a viewer's start need not.
    from rollbook.replay.what_if.changes import Changes, changed

    manifest = changed(plan, Changes(overrides=changes).rule(plan))
    if needs := recorded_algorithm(manifest.algorithm).needs & OF_MODELS:
        text = f"it needs {', '.join(sorted(needs))} of a model: use `rollbook replay what-if`"
        raise RequestError(400, "needs_model", text)
    samples = samples_at_cut(snapshot.store, manifest, run)
    return experience_at(manifest, samples, lambda *_: Scores())


PAGES = (
    Page("/compare/tasks", "compare_tasks.html", read_tasks),
    Page("/compare/steps", "compare_steps.html", read_steps_compared),
    Page("/runs/{run}/steps/{policy}/{step}/what-if", "what_if.html", read_what_if),
)
