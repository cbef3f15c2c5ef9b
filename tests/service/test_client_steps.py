"""What clients trained is a training like any other: its steps, what they trained on, and their replay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.service.conftest import BASE, Service
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.replay.step import operations
from rollbook.replay.step.partial import Part
from rollbook.replay.step.step import replay_step
from rollbook.store.errors import ReplayError
from rollbook.train.tenants.operations import STEP

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, started: Callable[..., Service]) -> Path:
    """The store of a service whose two clients have trained: one by its own samples, one on texts."""
    service = started(tmp_path_factory.mktemp("trained"))
    service.run("reinforce", base=BASE)
    service.run("train", base=BASE, count=3)
    service.run("saved_between", base=BASE)
    service.stop()
    return service.store


def _runs(store: Path) -> list[str]:
    with rb.connect(store) as connection:
        rows = connection.execute("SELECT run FROM steps GROUP BY run ORDER BY min(planned)").fetchall()
    return [run for (run,) in rows]


def _told(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_what_trained_a_step_is_asked_as_of_every_run(trained: Path) -> None:
    """Each step was trained on the sixteen sequences that its own version sampled, with their advantages; a
    step on texts on what has no trajectory."""
    own, texts, _ = _runs(trained)
    with rb.connect(trained) as connection:
        rows = connection.execute(
            """SELECT s.step, count(*), count(DISTINCT t.trajectory_id),
                      max(s.policy_version - t.policy_version), sum(r.reward)
               FROM samples s JOIN turns t USING (turn_id) JOIN rewards r ON r.trajectory_id = t.trajectory_id
               WHERE s.run = ? AND r.source = 'advantage' GROUP BY 1 ORDER BY 1""",
            [own],
        ).fetchall()
        named = connection.execute(
            "SELECT step, trajectory_id, turn_id FROM samples WHERE run = ? ORDER BY step, position", [texts]
        ).fetchall()
    assert [row[:4] for row in rows] == [(step, 16, 16, 0) for step in range(6)]
    assert all(abs(row[4]) < 1e-4 for row in rows)
    assert [row[:2] for row in named] == [(step, None) for step in range(3) for _ in range(4)]
    assert named[5][2].endswith(":train:0:3#1")


def test_the_ledger_balances(trained: Path) -> None:
    """Every token that was sampled was trained, or waits."""
    own, *_ = _runs(trained)
    text = _told("ledger", "--store", trained, "--run", own)
    assert "balances: 786 generated = 768 trained + 0 dropped + 18 waiting + 0 in flight" in text


def test_curves_signs_and_lineage_know_it(trained: Path, tmp_path: Path) -> None:
    """As of a training from the log."""
    own, *_ = _runs(trained)
    _told("plot", "--store", trained, "--run", own, "-o", tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert "no sign of failure in 6 steps" in _told("doctor", "--store", trained, "--run", own)
    text = _told("lineage", "step", 2, "--store", trained, "--run", own)
    assert "samples of 16 trajectories: 16" in text
    assert text.count("by          v2") == text.count("trajectory  ") == 8  # the first of them


@pytest.mark.parametrize(
    ("at", "step", "reran"), [(0, 4, [0, 1, 2, 3, 4]), (1, 1, [0, 1]), (2, 0, [0]), (2, 1, [0, 1])]
)
def test_a_step_replays_bit_for_bit(trained: Path, at: int, step: int, reran: list[int]) -> None:
    """From the log, the state before it, and the base model; also where that state stands within a step."""
    replay = replay_step(rb.open(trained), step, _runs(trained)[at])
    assert replay.bit_for_bit
    assert (replay.step, replay.reran, replay.from_version) == (step, reran, 0)
    assert [*replay.stages] == [
        *("input_weights", "input_optimizer", "samples", "logprobs", "gradients", "optimizer", "weights"),
        "metrics",
    ]


def test_the_first_step_and_stage_that_differ_are_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second step takes another learning rate."""
    effect_of = operations.effect_of

    def other(here: Any, accepted: Any, store: Path) -> Any:
        if accepted.operation == STEP and accepted.number == 4:
            accepted = replace(accepted, resolved=accepted.resolved | {"learning_rate": 0.5})
        return effect_of(here, accepted, store)

    monkeypatch.setattr(operations, "effect_of", other)
    replay = replay_step(rb.open(trained), 2, _runs(trained)[1])
    assert (replay.differs_at_step, replay.differs_in, replay.reran) == (1, "weights", [0, 1])


def test_what_is_not_replayed_is_told(trained: Path, tmp_path: Path) -> None:
    """Another base model, and commands that know samples of the log alone."""
    store = shutil.copytree(trained, tmp_path / "store")
    run = _runs(trained)[0]
    rule = ["--set", "algorithm.baseline=none", "--run", run, "--store", str(store)]
    done = CliRunner().invoke(app, ["replay", "what-if", "2", *rule])
    assert "was taken for a client of a service" in str(done.exception)
    with pytest.raises(ReplayError, match=r"was taken for a client of a service: `rollbook replay step 2"):
        replay_step(rb.open(store), 2, run, part=Part())
