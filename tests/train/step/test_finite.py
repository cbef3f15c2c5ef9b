"""A step whose numbers are not finite is named, and neither committed nor published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import trainer_records

from rollbook.engines.weights.digests import lines_of_stream, read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import NotFiniteError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyPublished,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
)
from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.sft import Sft
from rollbook.train.batches.batch import Batch, build_batch, partition
from rollbook.train.batches.experience import experience_of
from rollbook.train.config.phase import family_names
from rollbook.train.loop import trainer
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.select.samples import Sample, all_samples
from rollbook.train.step.finite import FiniteValues, check_batch, check_tokens

Stores = Callable[..., Store]
GRPO = Grpo(name="grpo", group_size=4, groups=1)


@pytest.fixture
def samples() -> list[Sample]:
    """Four of one group, of two prompt and two trained tokens each."""
    records = [record for i in range(4) for record in fabric.records(f"t{i}", group="g", reward=float(i))]
    return all_samples(fold(fabric.events(records)).values())


def _batch(samples: list[Sample], algorithm: Any = GRPO, size: int | None = None) -> Batch:
    return build_batch(experience_of(samples, algorithm), partition(len(samples), size))


def test_finite_numbers_pass(samples: list[Sample]) -> None:
    """A teacher's sample has no logprobs and no reward, and passes too."""
    check_batch(_batch(samples))
    teacher = [replace(s, reward=None, logprobs=np.full(len(s), np.nan, np.float32)) for s in samples]
    check_batch(_batch(teacher, Sft(name="sft")))
    check_tokens("losses", [torch.zeros(4, 3)], _batch(samples), partition(4, None))
    FiniteValues("weights")("a", torch.zeros(3))
    FiniteValues("weights")("none", torch.zeros(0))


def test_a_reward_without_end(samples: list[Sample]) -> None:
    """It makes all advantages of its group none, and is told with the first of them."""
    worse = [*samples[:2], replace(samples[2], reward=float("inf")), samples[3]]
    with pytest.raises(
        NotFiniteError, match=r"advantage nan of sample t0 \(turn t0.0\), whose reward is 0.0"
    ):
        check_batch(_batch(worse))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_engines_logprob_without_end(samples: list[Sample], value: float) -> None:
    """It is named with its token; outside of what is trained it does not matter."""
    logprobs = samples[2].logprobs.copy()
    logprobs[3] = value
    worse = [*samples[:2], replace(samples[2], logprobs=logprobs), samples[3]]
    with pytest.raises(
        NotFiniteError, match=rf"old_logprobs of token 3 of sample t2 \(turn t2.0\) is {value}"
    ):
        check_batch(_batch(worse))
    masked = replace(worse[2], loss_mask=np.zeros(len(samples[2]), np.bool_))
    check_batch(_batch([*samples[:2], masked, samples[3]]))


@pytest.mark.parametrize("size", [None, 3, 1])
def test_the_first_token_is_named(samples: list[Sample], size: int | None) -> None:
    """Whatever the micro-batches are."""
    parts = partition(4, size)
    tensors = [torch.zeros(len(rows), 3) for rows in parts[0]]
    where = [(m, row) for m, rows in enumerate(parts[0]) for row in range(len(rows))]
    for at in (3, 2):
        micro, row = where[at]
        tensors[micro][row, 1] = float("nan")
        with pytest.raises(
            NotFiniteError, match=rf"losses of token 2 of sample t{at} \(turn t{at}.0\) is nan"
        ):
            check_tokens("losses", tensors, _batch(samples, size=size), parts)


def test_the_first_tensor_is_named() -> None:
    """With how much of it is lost."""
    tensors = [("a", torch.zeros(3)), ("b", torch.tensor([0.0, float("inf"), float("nan")]))]
    with pytest.raises(NotFiniteError, match="gradients: 2 of 3 values of b are not finite"):
        lines_of_stream(tensors, FiniteValues("gradients"))
    assert lines_of_stream(tensors)
    for value in (float("inf"), -float("inf"), float("nan")):
        with pytest.raises(NotFiniteError, match="1 of 2 values of c"):
            FiniteValues("weights")("c", torch.tensor([1.0, value], dtype=torch.bfloat16))


# A training ----------------------------------------------------------------------------------------


def _published(log: Store) -> list[int]:
    """The versions that there are; the weights of each are finite."""
    for checkpoint in trainer_records(log, CheckpointWritten):
        held = read_weights(log.path / checkpoint.path)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in held.values())
    return [record.policy_version for record in trainer_records(log, PolicyPublished)]


def test_a_rate_that_is_far_too_high(recorded: Stores) -> None:
    """The step after fails in the log and says where it began; the run goes on with a lower rate."""
    log = recorded()
    wild = {"lr": 1e30, "weight_decay": 0.01}
    with pytest.raises(NotFiniteError, match=r"(gradients|logprobs).*: the step is not committed"):
        fabric.train(log, fabric.config(fabric.SFT, optimizer=wild, checkpoint_every=1))
    assert len(trainer_records(log, StepCommitted)) == 1
    (failed,) = trainer_records(log, StepFailed)
    assert (failed.step, failed.attempt) == (1, 1)
    assert "NotFiniteError" in failed.error
    assert _published(log) == [0, 1]


def test_weights_that_overflow(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that they would have been is none, and another training goes on from the one before."""
    log, step = recorded(), TrainablePolicy.optimizer_step

    def overflows(self: TrainablePolicy, learning_rate: float) -> float:
        norm = step(self, learning_rate)
        with torch.no_grad():
            next(iter(self.weights().values()))[0, 0] = float("inf")
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(TrainablePolicy, "optimizer_step", overflows)
        with pytest.raises(NotFiniteError, match=r"weights: 1 of \d+ values of model\.\S+ are not finite"):
            fabric.train(log, fabric.config(fabric.SFT, checkpoint_every=1))
    assert _published(log) == [0]
    fabric.train(log, fabric.config(fabric.SFT, steps=2, optimizer={"lr": 1e-3}))
    assert [(s.step, s.policy_version) for s in trainer_records(log, StepCommitted)] == [(0, 1), (1, 2)]


def test_a_step_that_an_earlier_rollbook_committed_replays(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with numbers that are none: what was, can be looked at."""
    log = recorded()
    with monkeypatch.context() as patch:
        run = trainer.run_step
        patch.setattr(trainer, "run_step", lambda *given, **options: run(*given, **options, finite=False))
        fabric.train(log, fabric.config(fabric.SFT, steps=2, optimizer={"lr": 1e30, "weight_decay": 0.01}))
    assert len(trainer_records(log, StepCommitted)) == 2
    code, out, _ = cli("replay", "step", 1, "--store", log.path)
    assert code == 0
    assert "bit for bit" in out


# on_not_finite = "skip" ----------------------------------------------------------------------------


def _spoil(monkeypatch: pytest.MonkeyPatch, *spoiled: int, stage: str = "losses") -> None:
    """Have the batches with these numbers, counted from 0 in the order in which they are run, overflow."""
    run, count = trainer.run_step, iter(range(1000))

    def spoils(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        if next(count) in spoiled:
            raise NotFiniteError(f"{stage} of token 1 is inf: the step is not committed", stage)
        return run(policy, settings, batch, **options)

    monkeypatch.setattr(trainer, "run_step", spoils)


def _leaves(refs: Any) -> list[str]:
    return [ref["turn_id"] for ref in refs]


@pytest.mark.more_but("GRPO")
@pytest.mark.parametrize("names", ["GRPO", "SFT"])
def test_a_batch_that_is_skipped(
    recorded: Stores,
    cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
) -> None:
    """Its samples are dropped by a rule, and its attempt failed; the next batches are trained, each once."""
    log, whole = recorded(), recorded("whole")
    settings = fabric.config(getattr(fabric, names), steps=2)
    fabric.train(whole, fabric.config(getattr(fabric, names), steps=3))
    batches = [_leaves(plan.samples) for plan in trainer_records(whole, StepPlanned)]
    _spoil(monkeypatch, 1)
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    code, _, err = cli(*command, "--set", "on_not_finite=skip")
    assert code == 0, err
    assert "step 1 failed (attempt 1): NotFiniteError('losses of token 1 is inf" in err
    plans = [(p.step, p.attempt, _leaves(p.samples)) for p in trainer_records(log, StepPlanned)]
    assert plans == [(0, 1, batches[0]), (1, 1, batches[1]), (1, 2, batches[2])]
    assert [(c.step, c.attempt) for c in trainer_records(log, StepCommitted)] == [(0, 1), (1, 2)]
    drops = trainer_records(log, SampleDropped)
    assert {(d.rule, d.step, d.attempt) for d in drops} == {("not_finite", 1, 2)}
    assert sorted(d.turn_id for d in drops) == sorted(batches[1])
    assert drops[0].detail == {"stage": "losses", "error": "losses of token 1 is inf"}
    history = fabric.steps_of(log)
    assert history.dropped == set(batches[1])
    assert not history.consumed() & history.dropped or names == "SFT"


@pytest.mark.more
def test_epochs_go_on_behind_what_was_skipped(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart takes the batch that comes next, and not once more what a step consumed."""
    log, whole = recorded(), recorded("whole")
    fabric.train(whole, fabric.config(fabric.SFT, steps=6))
    batches = [_leaves(plan.samples) for plan in trainer_records(whole, StepPlanned)]
    with monkeypatch.context() as patch:
        _spoil(patch, 1, 2)
        fabric.train(log, fabric.config(fabric.SFT, steps=2, on_not_finite="skip"))
    fabric.train(log, fabric.config(fabric.SFT, steps=4))
    committed = {(c.step, c.attempt) for c in trainer_records(log, StepCommitted)}
    taken = [
        _leaves(p.samples) for p in trainer_records(log, StepPlanned) if (p.step, p.attempt) in committed
    ]
    assert taken == [batches[i] for i in (0, 3, 4, 5)]
    dropped = [d.turn_id for d in trainer_records(log, SampleDropped) if (d.step, d.attempt) in committed]
    assert sorted(dropped) == sorted(batches[1] + batches[2]), "those of both skipped ones count"


def test_what_is_no_matter_of_samples_ends_it(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that overflowed, and one batch after the other, are an error with skip too."""
    log = recorded()
    settings = fabric.config(fabric.SFT, on_not_finite="skip")
    with monkeypatch.context() as patch:
        _spoil(patch, 1, stage="weights")
        with pytest.raises(NotFiniteError, match="weights of token 1"):
            fabric.train(log, settings)
    assert len(trainer_records(log, StepFailed)) == 1
    with monkeypatch.context() as patch:
        _spoil(patch, *range(100))
        with pytest.raises(NotFiniteError, match="losses of token 1"):
            fabric.train(log, settings)
    assert len(trainer_records(log, StepFailed)) == 1 + 8 + 1
    fabric.train(log, settings)
    assert len(trainer_records(log, StepCommitted)) == 9


def test_the_choice_is_no_part_of_the_trainings_name() -> None:
    """So whoever was stopped by such a step goes on in the same training, without it."""
    stop, skip = (fabric.config(fabric.SFT, on_not_finite=how) for how in ("stop", "skip"))
    assert (
        family_names(stop, "cut")
        == family_names(skip, "cut")
        == family_names(fabric.config(fabric.SFT), "cut")
    )


# on_not_finite = "retake" --------------------------------------------------------------------------


def _spoil_one(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The first step has a number that is none in this one of its samples."""
    run, left = trainer.run_step, [at]

    def spoils(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        if left:
            experience = batch.experience
            values = experience.advantages.values.astype(np.float64)
            values[left.pop()] = np.inf
            spoilt = replace(experience, advantages=replace(experience.advantages, values=values))
            return run(policy, settings, replace(batch, experience=spoilt), **options)
        return run(policy, settings, batch, **options)

    monkeypatch.setattr(trainer, "run_step", spoils)


@pytest.mark.more_but("hybrid")
@pytest.mark.parametrize("mode", ["async", "hybrid"])
def test_a_step_is_taken_again_without_the_sample(
    recorded: Stores, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """In which its numbers end: that one is dropped, the others are trained on at once; replayed."""
    log = recorded()
    _spoil_one(monkeypatch, 3)
    changes = {"steps": 1, "on_not_finite": "retake", "mode": mode}
    fabric.train(log, fabric.config(fabric.GRPO, **changes), "tail")
    plans = [(p.step, p.attempt, _leaves(p.samples)) for p in trainer_records(log, StepPlanned)]
    assert [attempt for _, attempt, _ in plans] == [1, 2]
    first, second = (leaves for *_, leaves in plans)
    assert second == first[:3] + first[4:]
    drops = trainer_records(log, SampleDropped)
    assert [(d.turn_id, d.rule, d.attempt, d.detail["stage"]) for d in drops] == [
        (first[3], "not_finite", 2, "advantages")
    ]
    assert [(c.step, c.attempt) for c in trainer_records(log, StepCommitted)] == [(0, 2)]
    assert replay_step(log, 0).differs_in is None


def test_a_pair_goes_together(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The better one of a pair is nothing without the other."""
    log = recorded()
    _spoil_one(monkeypatch, 3)
    algorithm = {"name": "dpo", "pairs": "rewards", "group_size": 4, "batch_size": 3}
    changes = {"steps": 1, "on_not_finite": "retake", "micro_batch_size": 2, "algorithm": algorithm}
    fabric.train(log, fabric.config(fabric.GRPO, **changes))
    first, second = (plan.samples for plan in trainer_records(log, StepPlanned))
    assert second == first[:2] + first[4:]


def test_where_the_sample_is_not_known(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is skipped."""
    log = recorded()
    _spoil(monkeypatch, 0)
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, on_not_finite="retake"))
    first, second = (set(_leaves(plan.samples)) for plan in trainer_records(log, StepPlanned))
    assert not first & second
