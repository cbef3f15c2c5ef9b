"""Each diagnosis fires on a course with its fault, alone, and none on a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import RunOpened, SampleDropped, StepFailed, SyncFailed, SyncStarted
from rollbook.train.doctor.signs import SIGNS, Course, HeldOut, findings

STEPS = 40
Of = Callable[[float], float]


def _row(at: float) -> dict[str, float]:
    """A healthy step's metrics, `at` from 0 to 1 of the training."""
    return {
        "entropy": 2 - at,
        "length_mean": 100 + 20 * at,
        "reward": 0.2 + 0.5 * at,
        "gradient_norm": 1.0 + 0.2 * (at * 37 % 1),
        "engine_logprob_gap": 1e-5,
        "clipped_low": 0.01,
        "clipped_high": 0.02,
        "truncated": 0.05,
        "explained_variance": 0.1 + 0.5 * at,
    }


def _course(**changed: Of) -> Course:
    rows = []
    for i in range(STEPS):
        at = i / (STEPS - 1)
        rows.append(_row(at) | {name: of(at) for name, of in changed.items()})
    return Course(
        rows, range(STEPS), {0: HeldOut(0.2, 1e-3), 10: HeldOut(0.4, 1e-3)}, {"staleness": 5}, 320, {}, []
    )


def _held_out(*means: float) -> dict[int, HeldOut]:
    """Of a hundred trajectories each, at every fifth version."""
    return {5 * i: HeldOut(mean, 0.25 / 100) for i, mean in enumerate(means)}


FAULTY = {
    "entropy_collapse": _course(entropy=lambda at: 2 * 0.01**at),
    "length_hacking": _course(length_mean=lambda at: 100 + 300 * at, reward=lambda at: 0.5),
    "reward_hacking": replace(_course(), held_out=_held_out(0.2, 0.5, 0.1)),
    "overfitting": replace(_course(loss=lambda at: 2 - at), held_out_losses={0: 2.0, 5: 1.4, 10: 1.6}),
    "critic_divergence": _course(explained_variance=lambda at: 0.5 - 2 * at),
    "sampler_gap": _course(engine_logprob_gap=lambda at: 0.3 if at > 0.8 else 1e-5),
    "empty_gradients": _course(gradient_norm=lambda at: 0.0 if at * 39 % 3 < 1 else 1.0),
    "exploding_gradient": _course(gradient_norm=lambda at: 100.0 if at > 0.8 else 1.0),
    "clip_saturation": _course(clipped_high=lambda at: 0.6 * at),
    "mostly_stale": replace(_course(), dropped={"staleness": 400}),
    "truncation": _course(truncated=lambda at: at),
    "failed_steps": replace(_course(), failed={7: "NotFiniteError('losses')"}),
    "failed_syncs": replace(_course(), syncs=["timed out"]),
}


def test_a_healthy_course_has_no_sign() -> None:
    """Entropy falls a little, samples grow a little, the reward rises."""
    assert findings(_course()) == []


def test_every_sign_has_a_fault() -> None:
    """A new sign needs a course with its fault here."""
    assert sorted(FAULTY) == sorted(sign.__name__ for sign in SIGNS)


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_alone(name: str) -> None:
    """With its numbers, a query and levers."""
    [found] = findings(FAULTY[name])
    assert found.name == name
    assert found.said
    assert found.evidence
    assert found.sql.startswith("SELECT ")
    assert found.levers


@pytest.mark.parametrize("means", [(0.2, 0.5, 0.46), (0.2, 0.5, 0.4), (0.5, 0.2, 0.6)])
def test_chance_is_no_fall(means: tuple[float, ...]) -> None:
    """A fall of less than a tenth, or of less than two standard errors, or that was made good."""
    assert findings(replace(_course(), held_out=_held_out(*means))) == []


def test_few_steps_are_not_judged() -> None:
    """Nine steps of a collapse are no course."""
    whole = FAULTY["entropy_collapse"]
    assert findings(replace(whole, rows=whole.rows[::5], numbers=range(8))) == []


@pytest.fixture
def log(fabric: Any, tmp_path: Path) -> Store:
    """A training of twelve steps whose entropy collapses, with a failed step and a failed sync."""
    log = rb.open(tmp_path / "store", create=True)
    made: list[Any] = [RunOpened("train", {})]
    for step in range(12):
        metrics = _row(step / 11) | {"entropy": 2 * 0.01 ** (step / 11), "trained_tokens": 100, "samples": 4}
        made += [fabric.planned(step, step), replace(fabric.committed(step, step + 1), metrics=metrics)]
    made += [fabric.planned(12, 12), StepFailed(12, 1, "actor", "no memory")]
    made += [SampleDropped("t", "t.0", "staleness", "r", 0, {})]
    made += [SyncStarted("actor", 3, "s", "e", "disk"), SyncFailed("actor", 3, "s", "e", "gone")]
    fabric.append(log, made, lane="train")
    return log


def test_the_command_reads_a_log(log: Store, cli: Callable[..., Any]) -> None:
    """Exit code 1, the failures with their steps; as JSON the evidence; each query runs."""
    code, out, _ = cli("doctor", "--store", log.path)
    assert code == 1
    assert "entropy_collapse (steps 0 to 11): entropy fell from" in out
    assert "no memory" in out
    code, out, _ = cli("doctor", "--store", log.path, "--json")
    said = orjson.loads(out)
    assert (code, said["steps"]) == (1, 12)
    assert [one["name"] for one in said["findings"]] == ["entropy_collapse", "failed_steps", "failed_syncs"]
    with rb.connect(log.path) as connection:
        for one in said["findings"]:
            assert connection.execute(one["sql"]).fetchall()


def test_metrics_are_columns(log: Store) -> None:
    """Of committed steps; what a step has not is null."""
    with rb.connect(log.path) as connection:
        rows = connection.execute("select step, entropy, reward, kl from metrics order by step").fetchall()
    assert [row[0] for row in rows] == list(range(12))
    assert rows[0][1:] == (2.0, 0.2, None)


def test_every_query_of_a_sign_runs(log: Store) -> None:
    """On any log."""
    with rb.connect(log.path) as connection:
        for course in FAULTY.values():
            connection.execute(findings(course)[0].sql).fetchall()


def test_a_healthy_training_exits_with_0(fabric: Any, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """And says so; a run without steps is said to have none."""
    log = rb.open(tmp_path / "healthy", create=True)
    fabric.append(log, [RunOpened("train", {})], lane="train")
    for step in range(12):
        done = replace(fabric.committed(step, step + 1), metrics=_row(step / 11))
        fabric.append(log, [fabric.planned(step, step), done], lane="train")
    code, out, _ = cli("doctor", "--store", log.path, "--run", fabric.RUN)
    assert code == 0
    assert "no sign of failure in 12 steps" in out


def test_an_earlier_training_is_not_judged(fabric: Any, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """An imitation whose entropy fell before, with drops, failures and a better evaluation, is no sign; at a
    cut before the second training it is."""
    log = rb.open(tmp_path / "two", create=True)
    fabric.append(log, [RunOpened("train", {})], lane="train")
    for step in range(24):
        at = step % 12 / 11
        metrics = _row(at) | ({"entropy": 9 * 0.01**at} if step < 12 else {"entropy": 0.1 - 0.01 * at})
        plan = fabric.planned(step, step, phase="first" if step < 12 else f"second#{2 + step // 18}")
        made = [StepFailed(4, 1, "actor", "no memory")] if step == 4 else []
        made += (
            [SampleDropped("t", f"t.{i}", "staleness", "r", 5, {}) for i in range(99)] if step == 5 else []
        )
        done = replace(fabric.committed(step, step + 1), metrics=metrics | {"samples": 4})
        fabric.append(log, [plan, *made, done], lane="train")
        if step in (2, 13, 20):
            rewards = [1.0] * 30 if step == 2 else [0.0, 0.1] * 15
            turns = [fabric.T(version=step)]
            for i, reward in enumerate(rewards):
                fabric.append(log, fabric.records(f"e{step}-{i}", turns, split="eval", reward=reward))
    code, out, _ = cli("doctor", "--store", log.path, "--json")
    assert (code, orjson.loads(out)["findings"], orjson.loads(out)["steps"]) == (0, [], 12)
    code, out, _ = cli("doctor", "--store", log.path, "--as-of", "train=123", "--json")
    assert "entropy_collapse" in [one["name"] for one in orjson.loads(out)["findings"]]
