"""Evaluation on held-out data, and early stopping: what is measured, and that training does not notice it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, EvalFinished, PreferenceAdded, StepCommitted, StopFired

EVERY_2 = {"evaluation": {"every": 2}}
RISES_TWICE = {"metric": "evaluation.loss", "better": "lower", "patience": 2}


def _losses(log: Store) -> dict[int, float]:
    return {record.policy_version: record.metrics["loss"] for record in records_of(log, EvalFinished)}


def _digests(log: Store) -> list[Any]:
    return [record.digests for record in records_of(log, StepCommitted)]


def _taught(path: Path, held_out: int = 5, *, contrary: bool = False) -> Store:
    """Teachers that count on, and held-out conversations that do too, or that count down."""
    log = rb.open(path, create=True)
    records = fabric.teacher_records(12)
    for i in range(held_out):
        start, by = 8 + 9 * i, -1 if contrary else 1
        turn = fabric.T([1, start], [start + by, start + 2 * by, 2], None, None, None)
        records += fabric.records(f"held{i}", [turn], split="eval")
    fabric.append(log, records)
    return log


def _mean_nll(folder: Path, paths: list[list[int]], prompt: int = 2) -> float:
    """Mean cross-entropy of the tokens after the prompt, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    losses: list[float] = []
    for path in paths:
        logprobs = model(torch.tensor([path])).logits[0].log_softmax(-1).detach()
        losses += [-float(logprobs[t - 1, path[t]]) for t in range(prompt, len(path))]
    return math.fsum(losses) / len(losses)


def test_the_loss_of_held_out_samples(tmp_path: Path) -> None:
    """Of the version before the first step, every second one, and the last: as transformers has it."""
    log = _taught(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.SFT, steps=5, checkpoint_every=1, **EVERY_2))
    evaluations = records_of(log, EvalFinished)
    assert [record.policy_version for record in evaluations] == [0, 2, 4, 5]
    assert {(record.samples, record.tokens, record.trajectories) for record in evaluations} == {(5, 15, 0)}
    assert evaluations[0].cut == records_of(log, rb.events.StepPlanned)[0].cut
    paths = [[1, s, s + 1, s + 2, 2] for s in (8 + 9 * i for i in range(5))]
    for version, loss in _losses(log).items():
        [path] = {c.path for c in records_of(log, CheckpointWritten) if c.policy_version == version}
        assert loss == pytest.approx(_mean_nll(log.path / path, paths), rel=1e-5)
    assert _losses(log)[5] < 0.9 * _losses(log)[0], "it learns to count"


def test_training_does_not_notice(tmp_path: Path) -> None:
    """The same bits with evaluations as without, and they replay."""
    plain, watched = (_taught(tmp_path / name) for name in ("plain", "watched"))
    fabric.train(plain, fabric.config(fabric.SFT, steps=4))
    rules = [{"metric": "evaluation.loss", "above": 1e9}, {"metric": "gradient_norm", "below": 0.0}]
    fabric.train(watched, fabric.config(fabric.SFT, steps=4, evaluation={"every": 1}, stop=rules))
    assert _digests(watched) == _digests(plain)
    assert len(records_of(watched, EvalFinished)) == 5
    assert replay_step(watched, 3).bit_for_bit


@pytest.mark.more
def test_the_same_however_the_forward_passes_are_cut(tmp_path: Path) -> None:
    """Samples of a forward pass decide nothing but rounding."""
    losses = []
    for size in (1, 2, 5):
        log = _taught(tmp_path / f"store{size}")
        fabric.train(log, fabric.config(fabric.SFT, steps=1, micro_batch_size=size, **EVERY_2))
        losses.append(_losses(log)[0])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_at_most_so_many_samples(tmp_path: Path) -> None:
    """The same ones each time, chosen by the seed."""
    log = _taught(tmp_path / "store", 9)
    fabric.train(log, fabric.config(fabric.SFT, steps=1, evaluation={"every": 9, "max_samples": 4}))
    other = _taught(tmp_path / "other", 9)
    fabric.train(other, fabric.config(fabric.SFT, steps=1, seed=8, evaluation={"every": 9, "max_samples": 4}))
    assert {
        record.samples for record in (*records_of(log, EvalFinished), *records_of(other, EvalFinished))
    } == {4}
    assert _losses(log)[0] != _losses(other)[0]


@pytest.mark.more
def test_held_out_pairs(tmp_path: Path) -> None:
    """DPO: how the policy rates held-out preferences; the reference itself rates all alike."""
    log = rb.open(tmp_path / "store", create=True)
    records: list[Any] = []
    for split, count in (("teacher", 12), ("eval", 6)):
        for i in range(count):
            turn = fabric.T([5, 6 + i % 3], [20 if i % 2 else 60, 21], logprobs=None, version=None)
            records += fabric.records(f"{split}{i:02}", [turn], split=split)
        records += [PreferenceAdded(f"{split}{i:02}", f"{split}{i + 1:02}") for i in range(0, count, 2)]
    fabric.append(log, records)
    dpo = {"name": "dpo", "batch_size": 4, "beta": 0.5}
    fabric.train(log, fabric.config(fabric.SFT, steps=4, algorithm=dpo, optimizer={"lr": 0.01}, **EVERY_2))
    first, *_, last = records_of(log, EvalFinished)
    assert (first.samples, first.policy_version, last.policy_version) == (6, 0, 4)
    assert first.metrics["loss"] == pytest.approx(math.log(2))
    assert (first.metrics["preference_accuracy"], first.metrics["preference_margin"]) == (0, 0)
    assert last.metrics["preference_accuracy"] == 1
    assert last.metrics["preference_margin"] > 0
    assert last.metrics["loss"] < math.log(2)
    with rb.connect(log.path) as connection:
        query = "select preference_accuracy, preference_margin from evaluations order by policy_version desc"
        row = connection.execute(f"{query} limit 1").fetchone()
    assert row == (last.metrics["preference_accuracy"], last.metrics["preference_margin"])


def test_rewards_of_held_out_trajectories(
    recorded: Callable[..., Store], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trajectory counts in one evaluation, once it has finished and has a reward."""
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=1, evaluation={"every": 1})
    fabric.train(log, settings)
    [first] = records_of(log, EvalFinished)
    assert (first.policy_version, first.metrics, first.trajectories, first.samples) == (
        0,
        {"reward": 1.0},
        1,
        0,
    )
    assert "version 1: nothing to evaluate it on" in capsys.readouterr().err
    turns = [fabric.T(version=1)]
    records = fabric.records("e1", turns, split="eval", reward=0.25, success=True)
    records += fabric.records("e2", turns, split="eval", reward=0.5, success=False)
    records += fabric.records("unrewarded", turns, split="eval")
    records += fabric.records("open", turns, split="eval", reward=9.0, finished=False)
    records += fabric.records("trained", turns, reward=9.0)
    fabric.append(log, records)
    fabric.append(log, fabric.records("elsewhere", turns, split="eval", reward=9.0), run="another")
    fabric.train(log, settings.model_copy(update={"steps": 2}))
    last = records_of(log, EvalFinished)[-1]
    assert (last.policy_version, last.metrics, last.trajectories) == (1, {"reward": 0.375, "success": 0.5}, 2)
    assert (last.oldest_version, last.newest_version) == (1, 1)
    with rb.connect(log.path) as connection:
        steps = connection.execute("SELECT step, held_out_reward FROM metrics ORDER BY step").fetchall()
    assert steps == [(0, 0.375), (1, None)], "of the version that a step made"


def test_a_restart_evaluates_what_is_missing(tmp_path: Path) -> None:
    """And nothing twice; the held-out samples stay those of the training's cut."""
    log = _taught(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    fabric.append(log, fabric.records("later", [fabric.T(version=None)], split="eval"))
    settings = fabric.config(fabric.SFT, steps=5, **EVERY_2)
    fabric.train(log, settings)
    assert [record.policy_version for record in records_of(log, EvalFinished)] == [2, 4, 5]
    fabric.train(log, settings)
    fabric.train(log, settings.model_copy(update={"steps": 6}))
    evaluations = records_of(log, EvalFinished)
    assert [record.policy_version for record in evaluations] == [2, 4, 5, 6]
    assert {(record.samples, record.cut) for record in evaluations} == {(5, evaluations[0].cut)}


@pytest.mark.more
def test_on_the_tail_it_is_what_was_there_at_first(tmp_path: Path) -> None:
    """Held-out samples that come later are in none of the evaluations that follow, restarted or not."""
    log = _taught(tmp_path / "store")

    def later() -> None:
        deadline = time.monotonic() + 60
        while not records_of(log, EvalFinished) and time.monotonic() < deadline:
            time.sleep(0.05)
        turn = fabric.T([1, 8], [9, 10, 2], None, None, None)
        records = fabric.records("later", [turn], split="eval") + fabric.teacher_records(12, "more")
        fabric.append(log, records, lane="later")

    recorder = threading.Thread(target=later)
    recorder.start()
    settings = fabric.config(fabric.SFT, steps=3, evaluation={"every": 1}, idle_timeout_s=60.0)
    fabric.train(log, settings, "tail")
    recorder.join()
    fabric.train(log, settings.model_copy(update={"steps": 4}), "tail")
    evaluations = records_of(log, EvalFinished)
    assert [record.policy_version for record in evaluations] == [0, 1, 2, 3, 4]
    assert {(record.samples, record.cut) for record in evaluations} == {(5, evaluations[0].cut)}


def test_nothing_is_held_out(tmp_path: Path) -> None:
    """An error with the remedy, and nothing is written."""
    log = _taught(tmp_path / "store", 0)
    before = log.head()
    with pytest.raises(TrainError, match=r"keeps no sample of split 'eval' in run demo .*source_runs"):
        fabric.train(log, fabric.config(fabric.SFT, **EVERY_2))
    assert log.head() == before
    assert not (log.path / "checkpoints").exists()


def test_samples_of_another_run(tmp_path: Path) -> None:
    """`source_runs` names where held-out samples are."""
    log = _taught(tmp_path / "store", 0)
    turn = fabric.T([1, 8], [9, 10, 2], None, None, None)
    fabric.append(log, fabric.records("q", [turn], split="eval"), run="benchmark")
    fabric.train(log, fabric.config(fabric.SFT, steps=1, evaluation={"source_runs": ["benchmark"]}))
    assert [(r.samples, r.tokens) for r in records_of(log, EvalFinished)] == [(1, 3), (1, 3)]


def test_overfitting_stops_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out loss rises twice: event, checkpoint, the words; again, and nothing more is written."""
    log = _taught(tmp_path / "store", contrary=True)
    rule = RISES_TWICE
    settings = fabric.config(fabric.SFT, evaluation={"every": 1}, stop=[rule])
    fabric.train(log, settings)
    [stop], losses = records_of(log, StopFired), list(_losses(log).values())
    assert stop.policy_version == len(losses) - 1 < 9
    assert stop.rule == rule
    assert [point["value"] for point in stop.values] == losses[-3:]
    assert min(losses) == losses[-3]
    assert f"stopped early after {stop.policy_version} of 9 steps" in capsys.readouterr().err
    assert [c for c in records_of(log, CheckpointWritten) if c.policy_version == stop.policy_version]
    before = log.head()
    fabric.train(log, settings)
    assert "stopped early after" in capsys.readouterr().err
    assert {type(e.record).KIND for e in log.events() if e.seq >= before.get(e.lane, 0)} == {"run.opened"}


@pytest.mark.more
def test_without_the_rule_it_goes_on(tmp_path: Path) -> None:
    """With the bits of a training that never stopped."""
    log, free = (_taught(tmp_path / name, contrary=True) for name in ("store", "free"))
    settings = fabric.config(fabric.SFT, evaluation={"every": 1}, stop=[RISES_TWICE])
    fabric.train(log, settings)
    assert len(records_of(log, StopFired)) == 1
    fabric.train(log, settings.model_copy(update={"stop": ()}))
    fabric.train(free, fabric.config(fabric.SFT))
    assert _digests(log) == _digests(free)


def test_a_rule_about_steps(tmp_path: Path) -> None:
    """The loss is below a bound twice in a row."""
    log = _taught(tmp_path / "store")
    fabric.train(log, fabric.config(fabric.SFT, steps=6))
    losses = [record.metrics["loss"] for record in records_of(log, StepCommitted)]
    bound = float(np.sort(losses)[3]) + 1e-9
    held = [a < bound and b < bound for a, b in pairwise(losses)]
    other = _taught(tmp_path / "other")
    rule = {"metric": "loss", "below": bound, "patience": 2}
    fabric.train(other, fabric.config(fabric.SFT, steps=6, stop=[rule]))
    assert len(records_of(other, StepCommitted)) == held.index(True) + 2
    assert records_of(other, StopFired)[0].values == [
        {"policy_version": version, "value": losses[version - 1]}
        for version in (held.index(True) + 1, held.index(True) + 2)
    ]


def test_a_rule_waits_for_the_batch_in_hand(recorded: Callable[..., Store]) -> None:
    """Two steps are taken on each rollout batch: the rule holds after the first, and ends it after both."""
    log = recorded()
    twice = {"name": "grpo", "groups": 2, "group_size": 4, "epochs": 2}
    rule = {"metric": "gradient_norm", "above": 0.0}
    settings = fabric.config(fabric.GRPO, steps=4, algorithm=twice, stop=[rule], evaluation={"every": 1})
    fabric.train(log, settings)
    assert [record.step for record in records_of(log, StepCommitted)] == [0, 1]
    assert [record.policy_version for record in records_of(log, StopFired)] == [2]
    assert fabric.steps_of(log).in_hand() == []


@pytest.mark.more
def test_abandoned_versions_do_not_count(tmp_path: Path) -> None:
    """Their evaluations and stops are none of the training's any more: it goes on, and stops anew."""
    log = _taught(tmp_path / "store", contrary=True)
    settings = fabric.config(fabric.SFT, checkpoint_every=1, evaluation={"every": 1}, stop=[RISES_TWICE])
    fabric.train(log, settings)
    [stop] = records_of(log, StopFired)
    fabric.train(log, settings, abandon_after=stop.policy_version - 1)
    current, again = fabric.steps_of(log), records_of(log, StopFired)
    assert len(again) == 2
    assert [record.policy_version for record in current.stops] == [again[1].policy_version]
    assert again[1].policy_version > stop.policy_version
    assert stop.policy_version not in [record.policy_version for record in current.evaluations]
