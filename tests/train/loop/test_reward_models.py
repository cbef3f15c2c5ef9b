"""Reward models: trained on pairs, evaluated, resumed, replayed, and read by transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, ModelError, TrainError
from rollbook.store.events import EvalFinished, PreferenceAdded, StepCommitted, StepPlanned
from rollbook.train.config.config import parse_config
from rollbook.train.doctor.preflight import preflight
from rollbook.train.select.samples import all_samples

Stores = Callable[..., Store]
RM = {"name": "reward_model", "batch_size": 4}


@pytest.fixture
def preferred(tmp_path: Path) -> Callable[..., Store]:
    """Makes stores of sixteen conversations in which replies that begin with 60 are preferred to such that
    begin with 20, by more and more; and of eight that are held out."""

    def make(name: str = "store") -> Store:
        log = rb.open(tmp_path / name, create=True)
        records: list[Any] = []
        for kind, count in (("teacher", 8), ("eval", 4)):
            for i in range(2 * count):
                turn = fabric.T(
                    [5, 6 + i % 3], [60 if i < count else 20, 21 + i % 4], logprobs=None, version=None
                )
                rewarded = {"reward": float(i)} if kind == "teacher" else {}
                records += fabric.records(f"{kind}{i:02}", [turn], split=kind, **rewarded)
            records += [
                PreferenceAdded(f"{kind}{i:02}", f"{kind}{i + count:02}", 0.5 * i if i else None)
                for i in range(count)
            ]
        # One held-out preference is the other way round, so that a temperature exists.
        records += [PreferenceAdded("eval05", "eval01")]
        fabric.append(log, records)
        return log

    return make


def _config(algorithm: dict[str, Any] | None = None, **changes: Any) -> Any:
    values = {
        "policy": "reward",
        "steps": 8,
        "micro_batch_size": 4,
        "checkpoint_every": 3,
        "algorithm": RM | (algorithm or {}),
        "recipe": {"splits": ["teacher"]},
        "optimizer": {"lr": 0.01},
    }
    return fabric.config(fabric.GRPO, **(values | changes))


def _replayed(log: Store, *steps: int) -> list[str | None]:
    return [replay_step(log, step, policy="reward").differs_in for step in steps]


@pytest.mark.more
def test_it_learns_the_preference(preferred: Stores) -> None:
    """From no opinion at all to every pair in order, beside the policy of the same run; each step replays."""
    log = preferred()
    fabric.train(log, fabric.config(fabric.SFT, steps=1))
    fabric.train(log, _config())
    steps = [step for step in records_of(log, StepCommitted) if step.policy == "reward"]
    first, last = steps[0].metrics, steps[-1].metrics
    assert first["loss"] == pytest.approx(math.log(2)), "a new head gives every sample 0"
    assert (first["preference_accuracy"], first["score_mean"]) == (0.0, 0.0)
    assert last["loss"] < 0.2
    assert last["preference_accuracy"] == 1.0
    assert last["preference_margin"] > 1.5
    assert "logprobs" not in steps[0].digests
    assert steps[0].digests["scores"] != steps[1].digests["scores"]
    assert _replayed(log, 0, 4, 7) == [None, None, None]
    rows = rb.connect(log.path).execute(
        "select score_mean, entropy from metrics where policy = 'reward' order by step"
    )
    assert rows.fetchall()[-1] == (last["score_mean"], None)


def test_transformers_gives_the_same_scores(preferred: Stores) -> None:
    """The checkpoint is a sequence classifier of transformers, which rates the same pairs the same."""
    from transformers import AutoModelForSequenceClassification

    log = preferred()
    fabric.train(log, _config(steps=4, algorithm={"batch_size": 8}))
    folder = log.path / "checkpoints/demo/reward/v00000003"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert model.config.num_labels == 1
    plan = records_of(log, StepPlanned)[3]
    paths = {sample.trajectory_id: sample.tokens for sample in all_samples(log.trajectories().values())}
    margins = []
    for chosen, rejected in zip(plan.samples[::2], plan.samples[1::2], strict=True):
        scores = []
        for ref in (chosen, rejected):
            with torch.no_grad():
                logits = model(torch.from_numpy(paths[ref["trajectory_id"]].astype(np.int64))[None]).logits
            scores.append(float(logits[0, 0]))
        margins.append(scores[0] - scores[1])
    margin = records_of(log, StepCommitted)[3].metrics["preference_margin"]
    assert margin == pytest.approx(np.mean(margins), abs=1e-5)
    assert margin > 0.1


@pytest.mark.more_but("margin-centring")
@pytest.mark.parametrize(
    "algorithm",
    [
        {"head": "mean_deviation"},
        {"margin": "recorded", "centring": 0.01},
        {"margin": "rewards"},
        {"batch_sum_to_zero": 0.5},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_every_kind_learns_and_replays(preferred: Stores, algorithm: dict[str, Any]) -> None:
    """A distribution of scores, margins and regularizers."""
    log = preferred()
    fabric.train(log, _config(algorithm))
    metrics = [step.metrics for step in records_of(log, StepCommitted)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["preference_accuracy"] == 1.0
    assert _replayed(log, 0, 5) == [None, None]
    if "head" in algorithm:
        assert metrics[0]["score_deviation"] == 1.0
        assert 0 < metrics[-1]["score_deviation"] != 1.0


def test_margins_are_in_the_manifest(preferred: Stores) -> None:
    """As recorded, 0 where none was, with the chosen sample alone; a change of one is found by the replay."""
    log = preferred()
    fabric.train(log, _config({"margin": "recorded"}, steps=2))
    refs = [ref for plan in records_of(log, StepPlanned) for ref in plan.samples]
    margins = {ref["trajectory_id"]: ref["margin"] for ref in refs if "margin" in ref}
    assert margins == {f"teacher{i:02}": 0.5 * i for i in range(8)}
    assert all("margin" not in ref for ref in refs[1::2])
    committed = records_of(log, StepCommitted)[0]
    assert "margins" in committed.digests


@pytest.mark.more
def test_sum_to_zero_is_of_the_whole_batch(preferred: Stores) -> None:
    """However the batch is cut into micro-batches, the same training, but for the last bits; and another one
    than without it."""
    metrics = {}
    for name, keys, size in (("one", 2.0, 8), ("two", 2.0, 4), ("four", 2.0, 2), ("without", 0.0, 8)):
        log = preferred(name)
        fabric.train(log, _config({"batch_sum_to_zero": keys}, micro_batch_size=size, steps=5))
        metrics[name] = [(s.metrics["loss"], s.metrics["score_mean"]) for s in records_of(log, StepCommitted)]
    assert np.allclose(metrics["one"], metrics["two"], atol=1e-4)
    assert np.allclose(metrics["one"], metrics["four"], atol=1e-4)
    assert not np.allclose(metrics["one"], metrics["without"], atol=1e-2)


@pytest.mark.more
def test_a_restart_goes_on(preferred: Stores) -> None:
    """The same bits as without the break, from between two checkpoints."""
    whole, broken = preferred("whole"), preferred("broken")
    settings = _config({"batch_sum_to_zero": 0.5, "margin": "recorded"}, steps=6)
    fabric.train(whole, settings)
    with fabric.killed_at(4):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    expected, other = ([step.digests for step in records_of(log, StepCommitted)] for log in (whole, broken))
    assert expected == other


def test_evaluation_and_its_temperature(preferred: Stores) -> None:
    """Held-out pairs: three of four in order once it has learnt, so that the temperature is finite and the
    loss with it is the least."""
    log = preferred()
    fabric.train(log, _config(evaluation={"every": 4}))
    metrics = [record.metrics for record in records_of(log, EvalFinished)]
    assert "calibration_temperature" not in metrics[0], "a new head rates no pair"
    last = metrics[-1]
    assert last["preference_accuracy"] == pytest.approx(4 / 5)
    assert last["calibrated_loss"] <= last["loss"]
    assert last["calibration_temperature"] > 0


def test_a_policy_is_no_reward_model(preferred: Stores) -> None:
    """Nor the other way round: both are refused, with another name for a remedy, and nothing is planned."""
    log = preferred()
    fabric.train(log, _config(steps=1))
    head = log.head()
    with pytest.raises(TrainError, match="is a reward model with a head of 1: algorithm sft cannot go on"):
        fabric.train(log, fabric.config(fabric.SFT, policy="reward"))
    with pytest.raises(TrainError, match="is a reward model with a head of 1: algorithm reward_model"):
        fabric.train(log, _config({"head": "mean_deviation"}))
    assert len(records_of(log, StepPlanned)) == 1
    assert log.head() == head
    model = log.path / "checkpoints/demo/reward/v00000001"
    with pytest.raises(ModelError, match="head of 1; the algorithm trains a policy"):
        fabric.train(log, fabric.config(fabric.SFT, policy="other", model=str(model)))


def test_a_reward_model_may_begin_from_another(preferred: Stores) -> None:
    """With its head; and the run's first version is then those weights."""
    log = preferred()
    fabric.train(log, _config(steps=2))
    settings = _config(steps=1, policy="second", model=str(log.path / "checkpoints/demo/reward/v00000002"))
    fabric.train(log, settings)
    fabric.train(log, settings.model_copy(update={"steps": 2}))
    manifests = [
        json.loads((log.path / f"checkpoints/demo/{name}/rollbook.json").read_text())["weights_digest"]
        for name in ("reward/v00000002", "second/v00000000")
    ]
    assert manifests[0] == manifests[1]


def test_before_a_training(preferred: Stores) -> None:
    """Preflight counts no logits of a vocabulary, and takes the shape with the head."""
    log = preferred()
    checks = {c.name: c for c in preflight(_config(), log, log.head(), "cut", 1 << 30)}
    assert checks["model"].verdict == "green"
    assert checks["data"].said.startswith("16 samples, 8 pairs")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"algorithm": RM | {"pairs": "rewards", "margin": "recorded"}},
            'margin = "recorded" belongs to pairs',
        ),
        (
            {"sync": {"engines": ["http://127.0.0.1:1"]}},
            r"\[sync\]: engines serve policies, and reward_model",
        ),
        ({"algorithm": RM | {"centring": -1}}, "greater than or equal to 0"),
        ({"recipe": {"max_staleness": 2}}, "no token is sampled by a reward model"),
        ({"micro_batch_size": 3}, "the samples of a pair lie in one forward pass"),
    ],
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], reason: str) -> None:
    """Each is refused, and the message says why."""
    with pytest.raises(ConfigError, match=reason):
        parse_config({"model": "m", "steps": 1, "algorithm": RM} | changes, "c")
