"""One step end to end: its loss, gradient and metrics against transformers, on what the manifest names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.models.weight_maps import to_huggingface
from tests.fakes.stories import fabric

from rollbook.engines.weights.digests import read_weights
from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import build_batch, partition
from rollbook.train.batches.experience import experience_of
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.loop.loop import gap_alarm
from rollbook.train.loop.trainer import StepOutcome
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.ranks.kept_digests import ALL_TREES
from rollbook.train.resume.restore import settings_of
from rollbook.train.select.samples import Sample, all_samples
from rollbook.train.step.step import StepResult, input_digests, run_step, step_seed


@pytest.fixture(scope="session")
def reference() -> Any:
    """The tiny model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(fabric.model_folder())


def _policy() -> TrainablePolicy:
    policy = TrainablePolicy(
        read_shape(fabric.model_folder()), OptimizerConfig(clip_grad=0.0), Build(4, torch.device("cpu"), 0, 1)
    )
    policy.load_weights(read_weights(fabric.model_folder()))
    return policy


def _samples() -> list[Sample]:
    """Four samples of one group, of unequal lengths and temperatures; one has an undelivered turn."""
    records = []
    for i, reward in enumerate((0.0, 1.0, 2.0, 4.0)):
        turns = [
            fabric.T([5, 6 + i], range(20, 22 + i), temperature=0.7),
            fabric.T([9], [40 + i, 41], 0, temperature=1.3, delivered=i != 2),
        ]
        records += fabric.records(f"t{i}", turns, group="g", reward=reward)
    return all_samples(fold(fabric.events(records)).values())


def _logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities of a sample's trained tokens, by transformers, one sequence at a time."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0, :-1]
    logits = logits / torch.from_numpy(sample.temperatures[1:])[:, None]
    picked = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return picked[torch.from_numpy(sample.loss_mask[1:])]


def _run(samples: list[Sample], algorithm: Any, size: int | None = None) -> tuple[Any, StepResult]:
    """Run a step on a fresh policy; the policy and the result."""
    policy = _policy()
    plan = replace(
        fabric.planned(0, 0, turns=[s.leaf_turn_id for s in samples]),
        partition=partition(len(samples), size),
        algorithm=algorithm,
        learning_rate=1e-3,
    )
    input_digests(policy, 0, ALL_TREES)
    batch = build_batch(experience_of(samples, recorded_algorithm(algorithm)), plan.partition)
    return policy, run_step(policy, settings_of(plan), batch)


def _same_gradient(policy: TrainablePolicy, model: Any) -> None:
    gradients = to_huggingface(policy.gradients(), policy.shape)
    for name, parameter in model.named_parameters():
        error = float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
        assert error < 2e-5, f"{name}: {error}"


@pytest.mark.parametrize("size", [None, 3, 1])
def test_sft_is_the_mean_over_the_trained_tokens(reference: Any, size: int | None) -> None:
    """Loss and gradient are those of the mean cross-entropy over every trained token of the batch."""
    samples = _samples()
    policy, result = _run(samples, {"name": "sft", "batch_size": 4}, size)
    reference.zero_grad()
    loss = -torch.cat([_logprobs(reference, s) for s in samples]).mean()
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["trained_tokens"] == sum(int(s.loss_mask.sum()) for s in samples) == 20
    assert result.metrics["samples"] == 4
    _same_gradient(policy, reference)
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    assert result.metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_grpo_is_the_policy_gradient_where_the_engine_agrees(reference: Any) -> None:
    """With the engine's logprobs equal to the trainer's, it is the advantage-weighted policy gradient."""
    samples = []
    for sample in _samples():
        logprobs = sample.logprobs.copy()
        with torch.no_grad():
            logprobs[sample.loss_mask] = _logprobs(reference, sample).numpy()
        samples.append(replace(sample, logprobs=logprobs))
    policy, result = _run(samples, {"name": "grpo"}, 3)
    rewards = np.array([0.0, 1.0, 2.0, 4.0])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    reference.zero_grad()
    parts = [a * _logprobs(reference, s) for a, s in zip(advantages, samples, strict=True)]
    (-torch.cat(parts).mean()).backward()
    _same_gradient(policy, reference)
    weights = [int(s.loss_mask.sum()) for s in samples]
    assert result.metrics["loss"] == pytest.approx(-np.average(advantages, weights=weights), abs=1e-5)
    assert result.metrics["engine_logprob_gap"] < 1e-5
    assert result.metrics["reward"] == 1.75


@pytest.mark.parametrize("size", [None, 3, 1])
def test_the_gap_to_the_engine_is_measured(reference: Any, size: int | None) -> None:
    """Of trained tokens only: those of the step's own version tell the engine's part, older are stale."""
    samples = _samples()
    _, result = _run(samples, {"name": "grpo"}, size)
    with torch.no_grad():
        gaps = [(_logprobs(reference, s) + 1.0).abs() for s in samples]
    assert result.metrics["engine_logprob_gap"] == pytest.approx(float(torch.cat(gaps).max()), rel=1e-5)
    assert result.metrics["engine_logprob_gap_mean"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)
    assert result.metrics["stale_logprob_gap"] is None
    older = [
        replace(s, versions=np.where(s.versions < 0, -1, -7 if i % 2 else 0)) for i, s in enumerate(samples)
    ]
    _, result = _run(older, {"name": "grpo"}, size)
    own, stale = torch.cat(gaps[::2]), torch.cat(gaps[1::2])
    assert result.metrics["engine_logprob_gap"] == pytest.approx(float(own.max()), rel=1e-5)
    assert result.metrics["stale_logprob_gap"] == pytest.approx(float(stale.max()), rel=1e-5)
    assert "engine_logprob_gap" not in _run(samples, {"name": "sft"})[1].metrics


@pytest.mark.parametrize(
    ("gap", "sync", "warns"),
    [
        (0.2, None, True),
        (0.04, None, False),
        (None, None, False),
        (0.2, {"partial_rollout": True, "pause": "retract"}, True),
        (0.2, {"partial_rollout": True, "pause": "in_place"}, False),
        (0.2, {"partial_rollout": False, "pause": "in_place"}, True),
    ],
)
def test_the_alarm_rings_where_the_engines_gap_is_large(gap: float | None, sync: Any, warns: bool) -> None:
    """Where the engine's part is not near zero; in place it is none, since prefixes are of older weights."""
    changes = {} if sync is None else {"sync": {"engines": ["http://e"], **sync}}
    settings = fabric.config(fabric.GRPO, **changes)
    message = gap_alarm(settings, StepOutcome(3, 4, {"engine_logprob_gap": gap}, 0))
    assert (message is not None) == warns
    if message is not None:
        assert message.startswith("step 3: an engine's logprobs of tokens of version 3,")
        assert "differ by 0.2 from the trainer's" in message


def test_a_step_has_every_stage_and_no_memory() -> None:
    """The digests cover each stage after the inputs; the same step on a fresh policy has the same ones."""
    first, second = (_run(_samples(), {"name": "sft"}, 2)[1] for _ in range(2))
    assert set(first.digests) == set(fabric.EVERY_STEPS_STAGES[3:])
    assert (first.digests, first.metrics) == (second.digests, second.metrics)
    assert first.evidence.described() == second.evidence.described()
    other = _run(_samples(), {"name": "sft"}, 4)[1]
    assert other.digests["samples"] != first.digests["samples"]


def test_a_steps_seed_is_decided_by_run_and_step() -> None:
    """A step's seed is decided by the run's seed and the step's number, and fits every generator."""
    seeds = {(run, step): step_seed(run, step) for run in (0, 1, 2**63 - 1) for step in range(200)}
    assert len(set(seeds.values())) == 600
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    # sha256 of 16 zero bytes begins 374708ff: as a little-endian number, halved.
    assert step_seed(0, 0) == 0xFF084737 // 2
