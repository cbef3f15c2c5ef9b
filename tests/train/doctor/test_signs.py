"""Each diagnosis fires on a log with its fault, alone, and none on a healthy one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import (
    EvalFinished,
    LaunchEnded,
    LaunchStarted,
    Record,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
    SyncFailed,
    SyncFinished,
    SyncStarted,
    TurnFailed,
)
from rollbook.train.doctor.evidence import HeldOut, Training, TrainingCourse
from rollbook.train.doctor.signs import SIGNS, findings

STEPS = 40
EACH = 20
"""Held-out trajectories of a version."""
Of = Callable[[float], float]
Rows = list[dict[str, Any]]


def _row(at: float) -> dict[str, float]:
    """A healthy step's metrics, `at` from 0 to 1 of the training."""
    return {
        "samples": 8,
        "trained_tokens": 800,
        "loss": 2 - at,
        "entropy": 2 - at,
        "length_mean": 100 + 20 * at,
        "reward": 0.2 + 0.5 * at,
        "gradient_norm": 1.0 + 0.2 * (at * 37 % 1),
        "engine_logprob_gap": 1e-5,
        "clipped_low": 0.01,
        "clipped_high": 0.02,
        "truncated": 0.05,
        "explained_variance": 0.1 + 0.5 * at,
        "kl": 0.001 + 0.5 * at,
        "old_kl": 0.01,
        "preference_accuracy": 0.5 + 0.4 * at,
        "chosen_logratio": -0.2 * at,
    }


@dataclass(frozen=True)
class Made:
    """What happened in a training, for a log that is made of it; by default all is well.

    Attributes:
        metrics: of steps, those that differ from healthy ones.
        won: of twenty held-out trajectories of versions 0, 10, ... how many have the reward 1.
        losses: of held-out samples at these versions; partial: those of the evaluations that are not whole.
        dropped: rule -> samples; failed: step -> error of its first attempt.
        broken: version -> error of a sync that failed before it was sent again.
        unanswered: error -> turns that failed by it.
        away: reason -> launches of agents whose infrastructure failed for it, beside thirty that did not.
    """

    metrics: Mapping[str, Of] = field(default_factory=dict)
    won: Sequence[int] = (4, 7, 10, 12, 13)
    losses: Sequence[float] = (2.0, 1.8, 1.7, 1.6, 1.6)
    partial: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=lambda: {"staleness": 5, "zero_variance": 8})
    failed: Mapping[int, str] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)
    unanswered: Mapping[str, int] = field(default_factory=lambda: {"EngineError('busy')": 2})
    away: Mapping[str, int] = field(default_factory=lambda: {"no engine": 3})

    def steps(self) -> list[Record]:
        """What the trainer writes: steps, drops, evaluations, syncs."""
        records: list[Record] = [RunOpened("train", {})]
        for step in range(STEPS):
            at = step / (STEPS - 1)
            metrics = _row(at) | {name: curve(at) for name, curve in self.metrics.items()}
            if step % 10 == 0:
                records += self._evaluated(step // 10)
            attempt = 1
            if step in self.failed:
                attempt = 2
                records += [fabric.planned(step, step), StepFailed(step, 1, "actor", self.failed[step])]
            records.append(fabric.planned(step, step, attempt=attempt))
            records.append(replace(fabric.committed(step, step + 1, attempt=attempt), metrics=metrics))
            records += self._sent(step + 1)
        records += self._evaluated(4)
        for rule, count in self.dropped.items():
            records += [SampleDropped("t", f"{rule}.{i}", rule, "r", i % STEPS, {}) for i in range(count)]
        return records

    def _evaluated(self, number: int) -> list[Record]:
        metrics = {"loss": self.losses[number], "reward": self.won[number] / EACH}
        whole = number not in self.partial
        rest = (EACH if whole else 13, None, None, metrics, EACH, whole)
        return [EvalFinished("actor", 10 * number, "p", "", "", 8, 800, *rest)]

    def _sent(self, version: int) -> list[Record]:
        records: list[Record] = []
        if version in self.broken:
            records.append(SyncStarted("actor", version, f"broken{version}", "e", "disk"))
            records.append(SyncFailed("actor", version, f"broken{version}", "e", self.broken[version]))
        if version % 10 == 0:
            records.append(SyncStarted("actor", version, f"s{version}", "e", "disk"))
            records.append(SyncFinished("actor", version, f"s{version}", "e", 1000, 0.1))
        return records

    def played(self) -> list[Record]:
        """What a proxy writes: held-out trajectories, and turns that no engine answered."""
        records: list[Record] = []
        for number, won in enumerate(self.won):
            turns = [fabric.T(version=10 * number)]
            for i in range(EACH):
                reward = float(i < won)
                records += fabric.records(f"e{number}-{i}", turns, split="eval", reward=reward)
        for error, count in self.unanswered.items():
            for i in range(count):
                name = f"{error}-{i}"
                records += fabric.records(name, [fabric.T(failed=True)], finished=False)[:2]
                records.append(TurnFailed(name, f"{name}.0", error))
        ends = [("done", None)] * 20 + [("agent_error", "exit code 3")] * 10 + [("cancelled", None)] * 9
        ends += [("infra_error", why) for why, count in self.away.items() for _ in range(count)]
        for i, (status, why) in enumerate(ends):
            place = {"epoch": 0, "task": "t", "sample": i}
            rest = ("nightly", place, 1, "subprocess", {}, "host-1", {})
            records += [LaunchStarted("e0-0", f"l{i}", *rest), LaunchEnded("e0-0", f"l{i}", status, why)]
        return records

    def write(self, path: Path) -> Store:
        """The log of it."""
        log = rb.open(path, create=True)
        fabric.append(log, self.steps(), lane="train")
        fabric.append(log, self.played())
        return log


@dataclass(frozen=True)
class Fault:
    """A training with a fault.

    Attributes:
        made: what happened in it.
        steps, evidence: what the doctor must say.
        seen: the same evidence, from the rows of the query that it shows.
        words: what it says in words.
    """

    made: Made
    steps: list[int] | None
    evidence: Mapping[str, Any]
    seen: Callable[[Rows], Mapping[str, Any]]
    words: str


WHOLE = [0, STEPS - 1]


def _half(first: float, then: float) -> Of:
    """One value in the first half, another in the second."""
    return lambda at: first if at < 0.5 else then


def _ends(rows: Rows, metric: str) -> list[float]:
    values = [row[metric] for row in rows]
    return [fmean(values[: STEPS // 10]), fmean(values[-STEPS // 10 :])]


def _first_last(metric: str) -> Callable[[Rows], Mapping[str, Any]]:
    return lambda rows: dict(zip(("first", "last"), _ends(rows, metric), strict=True))


def _counted(rows: Rows) -> Mapping[str, Any]:
    [row] = rows
    return row


def _errors(rows: Rows) -> Mapping[str, Any]:
    failed = [row for row in rows if row["status"] == "failed"]
    return {
        "failed": sum(row["turns"] for row in failed),
        "ended": sum(row["turns"] for row in rows),
        "errors": [{key: row[key] for key in ("lane", "error", "turns")} for row in failed],
    }


def _launches(rows: Rows) -> Mapping[str, Any]:
    failed = [row for row in rows if row["by_infrastructure"]]
    counts = [sum(row["launches"] for row in group) for group in (failed, rows)]
    return {
        **{"failed": counts[0], "ended": counts[1], "infra_failed_rate": counts[0] / counts[1]},
        "errors": [{key: row[key] for key in ("rollout", "why", "launches")} for row in failed],
    }


def _worst_gap(rows: Rows) -> Mapping[str, Any]:
    odd = [row["engine_logprob_gap"] for row in rows if row["engine_logprob_gap"] > 0.05]
    return {"steps": len(odd), "worst": max(odd)}


def _best(rows: Rows, version: str, value: str, best: Callable[..., Any]) -> dict[str, Any]:
    return {
        "evaluation": [row[value] for row in rows],
        "best_version": best(rows, key=lambda row: row[value])[version],
    }


TIMED_OUT = "EngineError('http://a:30000: no answer in 60 s')"
REFUSED = "EngineError('http://b:30000: refused')"
FAULTY = {
    "entropy_collapse": Fault(
        Made({"entropy": _half(2.0, 0.1)}),
        WHOLE,
        {"first": 2.0, "last": 0.1},
        _first_last("entropy"),
        "entropy fell from 2 to 0.1 nats",
    ),
    "length_hacking": Fault(
        Made({"length_mean": _half(100, 300), "reward": lambda at: 0.5}),
        WHOLE,
        {"lengths": [100, 300], "rewards": [0.5, 0.5]},
        lambda rows: {"lengths": _ends(rows, "length_mean"), "rewards": _ends(rows, "reward")},
        "samples grew from 100 to 300 trained tokens, the reward from 0.5 to 0.5",
    ),
    "reward_hacking": Fault(
        Made({"reward": _half(0.2, 0.9)}, won=(4, 10, 16, 10, 2)),
        WHOLE,
        {"training": [0.2, 0.9], "evaluation": [0.2, 0.5, 0.8, 0.5, 0.1], "best_version": 20},
        lambda rows: {"training": [0.2, 0.9]} | _best(rows, "version", "reward", max),
        "rose from 0.2 to 0.9 in training and fell from 0.8 at version 20 to 0.1 in evaluations",
    ),
    "overfitting": Fault(
        Made({"loss": _half(2.0, 0.5)}, losses=(2.0, 1.5, 1.4, 1.7, 1.9)),
        WHOLE,
        {"training": [2.0, 0.5], "evaluation": [2.0, 1.5, 1.4, 1.7, 1.9], "best_version": 20},
        lambda rows: {"training": [2.0, 0.5]} | _best(rows, "policy_version", "loss", min),
        "that of held-out samples is 1.9 and was 1.4 at version 20",
    ),
    "critic_divergence": Fault(
        Made({"explained_variance": _half(0.5, -1.0)}),
        WHOLE,
        {"first": 0.5, "last": -1.0},
        _first_last("explained_variance"),
        "explained variance is -1 at the end",
    ),
    "sampler_gap": Fault(
        Made({"engine_logprob_gap": lambda at: 0.3 if at > 0.8 else 1e-5}),
        [32, 39],
        {"steps": 8, "worst": 0.3},
        _worst_gap,
        "in 8 steps engine and trainer differ about tokens of one version, by up to 0.3",
    ),
    "empty_gradients": Fault(
        Made({"gradient_norm": lambda at: 0.0 if round(at * 39) % 4 == 0 else 1.0}),
        WHOLE,
        {"steps": 40, "without_gradient": 10, "zero_variance": 8, "used": 320},
        _counted,
        "10 of 40 steps had no gradient; 8 samples were dropped",
    ),
    "exploding_gradient": Fault(
        Made({"gradient_norm": lambda at: 100.0 if at > 0.8 else 1.0}),
        WHOLE,
        {"median": 1.0, "last": 100.0},
        lambda rows: {
            "median": median(row["gradient_norm"] for row in rows),
            "last": _ends(rows, "gradient_norm")[1],
        },
        "norm is 100 at the end, where its median is 1",
    ),
    "clip_saturation": Fault(
        Made({"clipped_high": _half(0.02, 0.6)}),
        WHOLE,
        {"low": 0.01, "high": 0.6},
        lambda rows: {"low": _ends(rows, "clipped_low")[1], "high": _ends(rows, "clipped_high")[1]},
        "61% of the tokens are clipped at the end",
    ),
    "mostly_stale": Fault(
        Made(dropped={"staleness": 400, "zero_variance": 8}),
        WHOLE,
        {"staleness": 400, "used": 320},
        _counted,
        "400 samples were dropped as stale and 320 used",
    ),
    "kl_explosion": Fault(
        Made({"kl": lambda at: 0.01 if at < 0.8 else 6.2e3}),
        WHOLE,
        {"metric": "kl", "first": 0.01, "last": 6.2e3},
        lambda rows: {"metric": "kl"} | dict(_first_last("kl")(rows)),
        "the KL from the reference (kl) grew from 0.01 to 6.2e+03 nats a token",
    ),
    "chosen_less_likely": Fault(
        Made({"chosen_logratio": lambda at: -2 * at, "preference_accuracy": lambda at: 0.5 + at / 2}),
        WHOLE,
        {"first": -2 * fmean(i / 39 for i in range(4)), "last": -2 * fmean(i / 39 for i in range(36, 40))},
        _first_last("chosen_logratio"),
        "a token of chosen samples lost 1.92 nats against the reference, 0.0769 at first",
    ),
    "falling_evaluations": Fault(
        Made({"reward": lambda at: 0.5}, won=(13, 12, 8, 4, 2)),
        WHOLE,
        {"evaluation": [0.65, 0.6, 0.4, 0.2, 0.1], "best_version": 0},
        lambda rows: _best(rows, "version", "reward", max),
        "the reward of evaluations fell from 0.65 at version 0 to 0.1",
    ),
    "partial_evaluations": Fault(
        Made(won=(4, 7, 10, 12, 1), partial=(4,)),
        None,
        {"versions": [40]},
        lambda rows: {"versions": [row["policy_version"] for row in rows]},
        "NOT WHOLE, and compared with no other: 13 of 20 trajectories at version 40",
    ),
    "truncation": Fault(
        Made({"truncated": _half(0.05, 0.5)}),
        WHOLE,
        {"first": 0.05, "last": 0.5},
        _first_last("truncated"),
        "50% of the samples are cut off at their greatest length at the end, 5% at first",
    ),
    "failed_steps": Fault(
        Made(failed={7: "NotFiniteError('losses')", 9: "no memory"}),
        [7, 9],
        {"steps": [7, 9]},
        lambda rows: {"steps": [row["step"] for row in rows]},
        "2 steps had attempts that failed; the last: no memory",
    ),
    "failed_syncs": Fault(
        Made(broken={10: "timed out", 30: "gone"}),
        None,
        {"syncs": 2, "versions": [10, 30]},
        lambda rows: {"syncs": len(rows), "versions": [row["policy_version"] for row in rows]},
        "2 syncs failed; the last, of version 30: gone",
    ),
    "failed_turns": Fault(
        Made(unanswered={TIMED_OUT: 8, REFUSED: 4}),
        WHOLE,
        {
            "failed": 12,
            "ended": 112,
            "errors": [
                {"lane": "serve", "error": TIMED_OUT, "turns": 8},
                {"lane": "serve", "error": REFUSED, "turns": 4},
            ],
        },
        _errors,
        f"12 of 112 turns failed since the training began (11%). 8 in lane serve: {TIMED_OUT}; 4 in lane",
    ),
    "failed_launches": Fault(
        Made(away={"no engine": 6, "no image": 4}),
        WHOLE,
        {
            **{"failed": 10, "ended": 40, "infra_failed_rate": 0.25},
            "errors": [
                {"rollout": "nightly", "why": "no engine", "launches": 6},
                {"rollout": "nightly", "why": "no image", "launches": 4},
            ],
        },
        _launches,
        "10 of 40 launches failed by their infrastructure since the training began (25%). 6 of rollouts",
    ),
}


def test_every_sign_has_a_fault() -> None:
    """A new sign needs a log with its fault here."""
    assert sorted(FAULTY) == sorted(sign.__name__ for sign in SIGNS)


def test_a_healthy_log_has_no_sign(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """With evaluations, drops, syncs and a few failed turns; entropy falls a little, the reward rises."""
    log = Made().write(tmp_path / "healthy")
    with rb.connect(log.path) as connection:
        for view, count in (("evaluations", 5), ("drops", 13), ("syncs", 4), ("metrics", STEPS)):
            assert connection.execute(f"SELECT count(*) FROM {view}").fetchone() == (count,)
        assert connection.execute("SELECT count(*) FROM turns WHERE status = 'failed'").fetchone() == (2,)
    code, out, _ = cli("doctor", "--store", log.path, "--json")
    assert (code, orjson.loads(out)["findings"]) == (0, [])
    code, out, _ = cli("doctor", "--store", log.path)
    assert (code, out) == (0, f"run {fabric.RUN}, policy actor: healthy, no sign of failure in 40 steps\n")


@pytest.mark.more_but(
    "clip_saturation",
    "critic_divergence",
    "entropy_collapse",
    "exploding_gradient",
    "failed_launches",
    "falling_evaluations",
    "kl_explosion",
    "mostly_stale",
    "reward_hacking",
)
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_alone(name: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """On a log made to have it: with its steps and levers, and a query that gives the numbers it quotes."""
    fault = FAULTY[name]
    log = fault.made.write(tmp_path / "faulty")
    code, out, _ = cli("doctor", "--store", log.path, "--json")
    report = orjson.loads(out)
    [finding] = report["findings"]
    assert (code, report["steps"], finding["name"], finding["steps"]) == (1, STEPS, name, fault.steps)
    assert fault.words in finding["said"]
    assert finding["levers"]
    with rb.connect(log.path) as connection:
        cursor = connection.execute(finding["sql"])
        columns = [column[0] for column in cursor.description or []]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    for evidence in (finding["evidence"], fault.seen(rows)):
        assert evidence.keys() == fault.evidence.keys()
        for key, value in fault.evidence.items():
            assert evidence[key] == (value if key == "errors" else pytest.approx(value)), key


def test_queries_are_of_one_training(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Another run, another policy and the training before add nothing to the numbers; nor do turns that
    failed before it. A quote in a name is no end of it."""
    log = rb.open(tmp_path / "several", create=True)
    run = "o'clock"
    early = [r for i in range(9) for r in fabric.records(f"early{i}", [fabric.T(failed=True)])]
    fabric.append(log, early, run=run)
    fault = FAULTY["entropy_collapse"].made
    records = [RunOpened("train", {}), *fault.steps()[1:]]
    steps = []
    for record in records:
        if isinstance(record, StepPlanned | StepCommitted):
            steps.append(replace(record, step=record.step + 3))
    first = []
    for step in range(3):
        done = replace(fabric.committed(step, step + 1), metrics=_row(0) | {"entropy": 99.0})
        first += [fabric.planned(step, step, phase="imitation"), done]
    fabric.append(log, [*first, *steps], lane="train", run=run)
    fabric.append(log, [fabric.planned(5, 5), replace(fabric.committed(5, 6), metrics={"entropy": 50.0})])
    other = replace(fabric.planned(5, 5), policy="judge")
    done = replace(fabric.committed(5, 6), policy="judge", metrics={"entropy": 70.0})
    fabric.append(log, [other, done], lane="judge", run=run)
    code, out, _ = cli("doctor", "--store", log.path, "--run", run, "--json")
    [finding] = orjson.loads(out)["findings"]
    assert (code, finding["name"], finding["steps"]) == (1, "entropy_collapse", [3, 42])
    with rb.connect(log.path) as connection:
        entropies = [row[1] for row in connection.execute(finding["sql"]).fetchall()]
    assert entropies == [2.0] * 20 + [0.1] * 20


def test_what_is_printed(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A failure with its steps, where to look, and what acts on it."""
    log = FAULTY["truncation"].made.write(tmp_path / "faulty")
    code, out, _ = cli("doctor", "--store", log.path)
    assert code == 1
    first, look, levers = out.splitlines()
    assert first.startswith("truncation (steps 0 to 39): 50% of the samples are cut off")
    assert look.startswith(
        "  look:   SELECT step, truncated, length_mean, length_max FROM metrics WHERE run ="
    )
    assert levers.startswith("  levers: the agents' max_tokens; ")


def test_no_step_is_no_failure(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A run whose training has not begun is said to have none, whatever failed before."""
    log = rb.open(tmp_path / "empty", create=True)
    fabric.append(log, Made(unanswered={TIMED_OUT: 50}).played())
    code, out, _ = cli("doctor", "--store", log.path)
    assert (code, out) == (0, f"run {fabric.RUN}, policy actor: no committed step\n")


def test_metrics_are_columns(tmp_path: Path) -> None:
    """Of committed steps; what a step has not is null."""
    log = Made().write(tmp_path / "healthy")
    with rb.connect(log.path) as connection:
        rows = connection.execute("select step, entropy, reward, kl from metrics order by step").fetchall()
    assert [row[0] for row in rows] == list(range(STEPS))
    assert rows[0][1:] == (2.0, 0.2, 0.001)


def _course(**changes: Any) -> TrainingCourse:
    rows = [_row(i / (STEPS - 1)) for i in range(STEPS)]
    held_out = {0: HeldOut(0.2, 1e-3), 10: HeldOut(0.4, 1e-3)}
    healthy = TrainingCourse(
        Training("r", "actor"), rows, range(STEPS), held_out, {"staleness": 5}, 320, {}, []
    )
    return replace(healthy, **changes)


@pytest.mark.parametrize("means", [(0.2, 0.5, 0.46), (0.2, 0.5, 0.4), (0.5, 0.2, 0.6)])
def test_chance_is_no_fall(means: tuple[float, ...]) -> None:
    """A fall of less than a tenth, or of less than two standard errors, or that was made good."""
    held_out = {5 * i: HeldOut(mean, 0.25 / 100) for i, mean in enumerate(means)}
    assert findings(_course(held_out=held_out)) == []


def test_few_steps_are_not_judged() -> None:
    """Nine steps of a collapse are no course."""
    rows = [_row(0) | {"entropy": 2 * 0.01 ** (i / 8)} for i in range(10)]
    assert [finding.name for finding in findings(_course(rows=rows, numbers=range(10)))] == [
        "entropy_collapse"
    ]
    assert findings(_course(rows=rows[:9], numbers=range(9))) == []


def test_an_earlier_training_is_not_judged(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """An imitation whose entropy fell before, with drops, failures and a better evaluation, is no sign; at a
    cut before the second training it is."""
    steps: list[Record] = [RunOpened("train", {})]
    played: list[Record] = []
    for step in range(24):
        at = step % 12 / 11
        metrics = _row(at) | ({"entropy": 9 * 0.01**at} if step < 12 else {"entropy": 0.1 - 0.01 * at})
        steps.append(fabric.planned(step, step, phase="first" if step < 12 else f"second#{2 + step // 18}"))
        if step == 4:
            steps.append(StepFailed(4, 1, "actor", "no memory"))
        if step == 5:
            steps += [SampleDropped("t", f"t.{i}", "staleness", "r", 5, {}) for i in range(99)]
        steps.append(replace(fabric.committed(step, step + 1), metrics=metrics | {"samples": 4}))
        if step in (2, 13, 20):
            rewards = [1.0] * 30 if step == 2 else [0.0, 0.1] * 15
            turns = [fabric.T(version=step)]
            for i, reward in enumerate(rewards):
                played += fabric.records(f"e{step}-{i}", turns, split="eval", reward=reward)
    log = rb.open(tmp_path / "two", create=True)
    fabric.append(log, steps, lane="train")
    fabric.append(log, played)
    code, out, _ = cli("doctor", "--store", log.path, "--json")
    assert (code, orjson.loads(out)["findings"], orjson.loads(out)["steps"]) == (0, [], 12)
    code, out, _ = cli("doctor", "--store", log.path, "--as-of", "train=123", "--json")
    assert "entropy_collapse" in [finding["name"] for finding in orjson.loads(out)["findings"]]
