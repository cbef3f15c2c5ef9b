"""The runs of a log, and one of them: its course, signs of failure, what is open, where its tokens went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollbook.store.sql.balance import TERMS, RunLedger, read_ledger
from rollbook.train.doctor import evidence, signs
from rollbook.viewer.pages import Page, Query, missing, whole_number
from rollbook.viewer.snapshots import Snapshot

LISTED = 50
"""Steps or trajectories that a page lists before it links to more."""

# All runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A policy of a run: how far it was trained.

    Attributes:
        steps: that were committed, and not abandoned; version: that the newest of them made.
        rewards: mean reward of each step's samples; of those that have one.
    """

    policy: str
    steps: int
    version: int | None
    algorithm: str
    committed: datetime
    rewards: Sequence[float]

    @property
    def reward(self) -> float | None:
        """The newest one."""
        return self.rewards[-1] if self.rewards else None


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run.

    Attributes:
        trajectories, open: how many it has, and how many of them are not finished.
        opened: when its first command began; last: when an agent last did something, or a step committed.
    """

    run: str
    policies: Sequence[PolicyLine]
    trajectories: int
    open: int
    reward: float | None
    opened: datetime | None
    last: datetime | None


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs, the newest first."""

    runs: Sequence[RunLine]


_POLICIES = """
    SELECT run, policy, count(*) AS steps, max(policy_version) + 1 AS version,
           arg_max(algorithm, step) AS algorithm, arg_max(step, step) AS newest,
           list(reward ORDER BY step) FILTER (reward IS NOT NULL) AS rewards
    FROM metrics WHERE status = 'committed' GROUP BY run, policy ORDER BY run, policy"""
_COMMITTED = (
    "SELECT run, policy, max(committed) AS committed FROM steps WHERE status = 'committed' GROUP BY ALL"
)
_TRAJECTORIES = """
    SELECT run, count(*) AS trajectories, count(*) FILTER (status = 'open') AS open, avg(reward) AS reward,
           max(coalesce(finished, opened)) AS last, min(opened) AS first
    FROM trajectories GROUP BY run"""
_OPENED = "SELECT run, min(opened) AS opened FROM runs GROUP BY run"


def read_runs(snapshot: Snapshot, query: Query) -> Runs:
    """All runs."""
    return snapshot.once(("runs",), lambda: _read_runs(snapshot))


def _read_runs(snapshot: Snapshot) -> Runs:
    committed = {(row["run"], row["policy"]): row["committed"] for row in snapshot.rows(_COMMITTED)}
    policies: dict[str, list[PolicyLine]] = {}
    for row in snapshot.rows(_POLICIES):
        line = PolicyLine(
            row["policy"],
            row["steps"],
            row["version"],
            row["algorithm"],
            committed[row["run"], row["policy"]],
            row["rewards"] or (),
        )
        policies.setdefault(row["run"], []).append(line)
    agents = {row["run"]: row for row in snapshot.rows(_TRAJECTORIES)}
    opened = {row["run"]: row["opened"] for row in snapshot.rows(_OPENED)}
    lines = [_line(run, policies.get(run, []), agents.get(run), opened.get(run)) for run in opened | agents]
    return Runs(sorted(lines, key=lambda line: line.last or datetime.min, reverse=True))


def _line(run: str, policies: Sequence[PolicyLine], agents: Any, opened: datetime | None) -> RunLine:
    times = [policy.committed for policy in policies] + ([agents["last"]] if agents else [])
    return RunLine(
        run,
        policies,
        agents["trajectories"] if agents else 0,
        agents["open"] if agents else 0,
        agents["reward"] if agents else None,
        opened or (agents["first"] if agents else None),
        max(times, default=opened),
    )


# A run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command that wrote events of a run."""

    command: str
    lane: str
    opened: datetime
    model: str | None


@dataclass(frozen=True, slots=True)
class EngineLine:
    """An engine, and the version that it was last seen to hold, its tensors verified."""

    engine: str
    policy: str
    policy_version: int
    time: datetime


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories of a run by their split and status."""

    split: str
    status: str
    trajectories: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        policy: which its course is shown of; None where nothing was trained.
    """

    line: RunLine
    policy: str | None
    commands: Sequence[Command]
    engines: Sequence[EngineLine]
    groups: Sequence[Group]


_COMMANDS = "SELECT command, lane, opened, model FROM runs WHERE run = $run ORDER BY opened DESC LIMIT 20"
_ENGINES = """
    SELECT engine, policy, arg_max(policy_version, time) AS policy_version, max(time) AS time
    FROM activations WHERE run = $run GROUP BY engine, policy ORDER BY engine, policy"""
_GROUPS = """
    SELECT split, status, count(*) AS trajectories, avg(reward) AS reward
    FROM trajectories WHERE run = $run GROUP BY split, status ORDER BY trajectories DESC"""


def read_run(snapshot: Snapshot, query: Query) -> Run:
    """A run.

    Raises:
        RequestError: 404, it is not in the log.
    """
    line = find_run(snapshot, query)
    named = query.get("policy")
    policies = [policy.policy for policy in line.policies]
    policy = named if named in policies else next(iter(policies), None)
    return Run(
        line,
        policy,
        [Command(**row) for row in snapshot.rows(_COMMANDS, run=line.run)],
        [EngineLine(**row) for row in snapshot.rows(_ENGINES, run=line.run)],
        [Group(**row) for row in snapshot.rows(_GROUPS, run=line.run)],
    )


def find_run(snapshot: Snapshot, query: Query) -> RunLine:
    """The run that an address names.

    Raises:
        RequestError: 404, it is not in the log.
    """
    for line in read_runs(snapshot, {}).runs:
        if line.run == query["run"]:
            return line
    raise missing(f"run {query['run']!r}", "the first page lists the runs")


# Parts of a run's page, each asked for by itself --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of failure in a policy's newest training, or that there is none."""

    run: str
    policy: str
    steps: int
    findings: Sequence[evidence.Finding]


def read_signs(snapshot: Snapshot, query: Query) -> Signs:
    """What `rollbook doctor` finds."""
    run, policy = query["run"], query["policy"]

    def diagnose() -> Signs:
        with snapshot.connection.cursor() as cursor:
            course = evidence.read_course(cursor, run, policy)
        return Signs(run, policy, len(course.numbers), signs.findings(course))

    return snapshot.once(("signs", run, policy), diagnose)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a run's sampled tokens went; None: it has no completed turn."""

    run: str
    terms: Sequence[str]
    ledger: RunLedger | None


def read_run_ledger(snapshot: Snapshot, query: Query) -> Ledger:
    """What `rollbook ledger` prints."""

    def read() -> list[RunLedger]:
        with snapshot.connection.cursor() as cursor:
            return read_ledger(cursor)

    ledgers = snapshot.once(("ledger",), read)
    found = next((ledger for ledger in ledgers if ledger.run == query["run"]), None)
    return Ledger(query["run"], TERMS, found)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a policy, the newest first; `more`: the number before which there are others."""

    run: str
    policy: str
    steps: Sequence[dict[str, Any]]
    more: int | None


_STEPS = """
    SELECT step, status, policy_version, algorithm, samples, reward, loss, entropy, staleness_mean,
           flat_groups, seconds
    FROM metrics WHERE run = $run AND policy = $policy AND step < $before
    ORDER BY step DESC, status DESC LIMIT $most"""


def read_steps(snapshot: Snapshot, query: Query) -> Steps:
    """The steps of a policy before one of them."""
    run, policy = query["run"], query["policy"]
    before = whole_number(query, "before", 2**62)
    steps = snapshot.rows(_STEPS, run=run, policy=policy, before=before, most=LISTED + 1)
    return Steps(run, policy, steps[:LISTED], steps[LISTED - 1]["step"] if len(steps) > LISTED else None)


@dataclass(frozen=True, slots=True)
class Curves:
    """Metrics of a policy's steps, by name, each as long as `step`; null where a step has none."""

    step: Sequence[int]
    metrics: dict[str, Sequence[float | None]]


DRAWN = (
    *("reward", "loss", "entropy", "kl", "old_kl", "gradient_norm", "length_mean", "truncated"),
    *("staleness_mean", "engine_logprob_gap", "preference_accuracy", "flat_groups", "tokens_s"),
)
"""Metrics that are drawn, of those of which there are values."""
_CURVES = f"""
    SELECT list(step ORDER BY step) AS step, list(held_out_reward ORDER BY step) AS held_out_reward,
           {", ".join(f"list({name} ORDER BY step) AS {name}" for name in DRAWN)}
    FROM metrics WHERE run = $run AND policy = $policy AND status = 'committed'"""


def read_curves(snapshot: Snapshot, query: Query) -> Curves:
    """The metrics of a policy's steps that are drawn."""
    row = snapshot.row(_CURVES, run=query["run"], policy=query["policy"]) or {}
    step = row.pop("step", None) or ()
    metrics = {name: values for name, values in row.items() if values and any(v is not None for v in values)}
    return Curves(step, metrics)


PAGES = (
    Page("/runs", "runs.html", read_runs),
    Page("/runs/{run}", "run.html", read_run),
    Page("/runs/{run}/signs/{policy}", "signs.html", read_signs),
    Page("/runs/{run}/ledger", "ledger.html", read_run_ledger),
    Page("/runs/{run}/steps/{policy}", "steps.html", read_steps),
    Page("/runs/{run}/curves/{policy}", "curves.html", read_curves),
)
