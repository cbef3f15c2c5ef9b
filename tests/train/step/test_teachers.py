"""A policy that learns from teachers: whose logprobs they are, what is made of them, and replays."""

from __future__ import annotations

import shutil
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
from rollbook.store.events import (
    CheckpointWritten,
    PolicyPublished,
    StepCommitted,
    StepPlanned,
    StepVectors,
)
from rollbook.train.batches.manifest_batch import recorded_values, samples_at_cut
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.step import apart as processes

Stores = Callable[..., Store]
TAUGHT = {"name": "grpo", "groups": 1, "group_size": 4, "teacher_kl": 0.5}
ALONE = {"name": "distillation", "groups": 4}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}


def _config(algorithm: dict[str, Any], *teachers: dict[str, Any], **changes: Any) -> Any:
    wide = {"model": str(fabric.wide_folder())}
    given = {"algorithm": algorithm, "teacher": list(teachers) or [wide], "steps": 2} | changes
    return fabric.config(fabric.GRPO, **given)


def _transformers(folder: Path, sample: Any) -> Any:
    """The logprobs of a sample's trained tokens by transformers, at their temperatures."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
    mask = sample.loss_mask.copy()
    mask[0] = False
    at = np.flatnonzero(mask)
    scaled = logits[at - 1] / torch.from_numpy(sample.temperatures[at])[:, None]
    return scaled.log_softmax(-1)[range(len(at)), sample.tokens[at].tolist()].numpy()


def _recorded(log: Store, step: int) -> Any:
    """The recorded logprobs of a step's trained tokens by its teachers."""
    vectors = records_of(log, StepVectors)
    (found,) = [v for v in vectors if v.step == step and v.stage == "teacher_logprobs"]
    return recorded_values(found)


def _samples(log: Store, step: int) -> list[Any]:
    plan = records_of(log, StepPlanned)[step]
    named = samples_at_cut(log, plan, fabric.RUN)
    return [named[ref["turn_id"]] for ref in plan.samples]


@pytest.mark.parametrize("changes", [{}, PACKED], ids=["padded", "packed"])
def test_its_logprobs_are_recorded(recorded: Stores, changes: dict[str, Any]) -> None:
    """Those of a model of another width, as transformers computes them; the step replays bit for bit."""
    log = recorded()
    settings = _config(TAUGHT, record={"vectors": ["teacher_logprobs"]}, **changes)
    fabric.train(log, settings)
    expected = [_transformers(fabric.wide_folder(), sample) for sample in _samples(log, 1)]
    assert _recorded(log, 1) == pytest.approx(np.concatenate(expected), abs=2e-5)
    assert [replay_step(log, step).differs_in for step in (0, 1)] == [None, None]
    plans, (held,) = records_of(log, StepPlanned), _checkpoints(log)
    described = [{"name": None, "labels": [], "line": "actor.teacher", "version": 0}]
    assert [plan.teachers for plan in plans] == [described] * 2
    assert {plan.input_digests["teacher_weights"] for plan in plans} == {held.weights_digest}


def _checkpoints(log: Store) -> list[CheckpointWritten]:
    return [c for c in records_of(log, CheckpointWritten) if c.policy.startswith("actor.teacher")]


def test_its_opinion_is_the_advantage(recorded: Stores) -> None:
    """Alone: a token's advantage is its logprob by the teacher less that which it was sampled with."""
    log = recorded()
    fabric.train(log, _config(ALONE, steps=1, record={"vectors": ["teacher_logprobs"]}))
    (step,) = records_of(log, StepCommitted)
    gaps, samples = [], _samples(log, 0)
    for sample in samples:
        mask = sample.loss_mask.copy()
        mask[0] = False
        gaps.append(_transformers(fabric.wide_folder(), sample) - sample.logprobs[mask])
    assert step.metrics["teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=2e-5)
    assert "rewards" in step.digests
    assert replay_step(log, 0).differs_in is None


def test_the_policy_comes_nearer(recorded: Stores) -> None:
    """Of epochs over one batch each has less divergence than the one before."""
    log = recorded()
    algorithm = ALONE | {"epochs": 6, "groups": 8, "old": "trainer", "clip_low": 1.0, "clip_high": 10.0}
    fabric.train(log, _config(algorithm, steps=6, optimizer={"lr": 3e-3}))
    first, *_, last = records_of(log, StepCommitted)
    assert first.metrics["teacher_kl"] == last.metrics["teacher_kl"]  # of the batch, by the weights before it
    assert last.metrics["loss"] < first.metrics["loss"]


def test_a_version_of_the_same_run(recorded: Stores) -> None:
    """A version of the policy teaches its next ones; it is copied once, for all restarts."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, steps=2, checkpoint_every=2))
    for steps in (1, 2):
        fabric.train(log, _config(TAUGHT | {"groups": 1}, {"version": 0}, steps=steps))
    version_0 = next(c for c in records_of(log, CheckpointWritten) if c.policy == "actor")
    (copy,) = _checkpoints(log)
    assert copy.weights_digest == version_0.weights_digest
    published = [p for p in records_of(log, PolicyPublished) if p.policy == "actor.teacher"]
    assert [(p.policy_version, p.parent_version, p.path) for p in published] == [(0, None, copy.path)]
    assert replay_step(log, 3).differs_in is None


def test_another_teacher_is_the_next_version(recorded: Stores, tmp_path: Path) -> None:
    """The steps of each say which it was, also once the folder that it came from is gone."""
    log, folder = recorded(), tmp_path / "teacher"
    for source in (fabric.wide_folder(), fabric.untied_folder()):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        algorithm = TAUGHT | {"teacher_kl": 0.5 if source == fabric.wide_folder() else 0.25}
        fabric.train(log, _config(algorithm, {"model": str(folder)}, steps=1))
    shutil.rmtree(folder)
    versions = [[what["version"] for what in plan.teachers] for plan in records_of(log, StepPlanned)]
    assert versions == [[0], [1]]
    assert [replay_step(log, step).differs_in for step in (0, 1)] == [None, None]
    fabric.train(log, _config(TAUGHT | {"teacher_kl": 0.25}, {"model": str(folder)}, steps=2))
    assert records_of(log, StepPlanned)[2].teachers == records_of(log, StepPlanned)[1].teachers


def test_several_by_label(root: Path, tmp_path: Path) -> None:
    """Each trajectory has the first teacher whose labels it has; one that has none is not taught."""
    log = rb.open(tmp_path / "store", create=True)
    items: list[Any] = []
    for i, topic in enumerate(["mathematics", "law", "cooking", "law"]):
        turns = [fabric.T((5, 6 + i), (7, 8 + i, 9)), fabric.T((10,), (11, 12), 0)]
        items += fabric.records(f"t{i}", turns, group="g", reward=float(i), labels={"topic": topic})
    fabric.append(log, items)
    wide, untied = fabric.wide_folder(), fabric.untied_folder()
    teachers = [
        {"name": "mathematics", "labels": ["topic=mathematics"], "model": str(wide)},
        {"name": "law", "labels": ["topic=law"], "model": str(untied)},
    ]
    settings = _config(TAUGHT, *teachers, steps=1, record={"vectors": ["teacher_logprobs"]}, **PACKED)
    fabric.train(log, settings)
    values, at = _recorded(log, 0), 0
    for sample in _samples(log, 0):
        own = values[at : at + sample.learnable]
        at += sample.learnable
        by = {"t0": wide, "t1": untied, "t3": untied}.get(sample.name)
        if by is None:
            assert np.isnan(own).all()
        else:
            assert own == pytest.approx(_transformers(by, sample), abs=2e-5)
    assert at == len(values)
    assert replay_step(log, 0).differs_in is None
    assert [c.policy for c in _checkpoints(log)] == ["actor.teacher.mathematics", "actor.teacher.law"]


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"} | PACKED], ids=["padded", "packed bfloat16"])
def test_apart_it_has_the_same_bits(
    recorded: Stores, warm_ranks: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A process of its own computes what a teacher in place does."""
    here, apart = recorded("here"), recorded("apart")
    fabric.train(here, _config(TAUGHT, **changes))
    started: list[Any] = []
    begin = processes.ModelProcess.__init__

    def begins(self: Any, what: str, *given: Any) -> None:
        started.append(what)
        begin(self, what, *given)

    monkeypatch.setattr(processes.ModelProcess, "__init__", begins)
    wide = {"model": str(fabric.wide_folder()), "apart": True}
    fabric.train(apart, _config(TAUGHT, wide, **changes))
    digests = [step.digests for step in records_of(here, StepCommitted)]
    assert [step.digests for step in records_of(apart, StepCommitted)] == digests
    assert started == ["the teacher"]
    assert replay_step(apart, 1).differs_in is None


@pytest.mark.more
def test_with_critic_reference_and_epochs(recorded: Stores) -> None:
    """Every score that an algorithm may ask for, in steps on one rollout batch, killed between them."""
    algorithm = {
        "name": "ppo",
        "groups": 4,
        "kl": 0.1,
        "teacher_kl": 0.3,
        "teacher_discount": 0.5,
        "epochs": 2,
    }
    whole, broken = recorded("whole"), recorded("broken")
    fabric.train(whole, _config(algorithm, steps=4))
    with fabric.killed_at(3):
        fabric.train(broken, _config(algorithm, steps=4))
    fabric.train(broken, _config(algorithm, steps=4))
    digests = [step.digests for step in records_of(whole, StepCommitted)]
    assert [step.digests for step in records_of(broken, StepCommitted)] == digests
    assert [replay_step(broken, step).differs_in for step in range(4)] == [None] * 4


@pytest.mark.ranks
def test_over_ranks(recorded: Stores) -> None:
    """The teacher is laid out as the policy is; a replay on the same ranks has the same bits."""
    changes = {"parallel": {"tensor": 2}} | PACKED
    log = recorded()
    fabric.train(log, _config(TAUGHT, **changes), ranks=4)
    assert replay_step(log, 1).differs_in is None


# What is found ------------------------------------------------------------------------------------


def test_other_weights_in_its_place(recorded: Stores) -> None:
    """Whoever forges the folder is found by its digest."""
    log = recorded()
    fabric.train(log, _config(TAUGHT, steps=1))
    (held,) = _checkpoints(log)
    file = log.path / held.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ModelError, match="weights damaged"):
        replay_step(log, 0)


def test_a_forged_opinion_is_named(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose teacher said something else differs first in the teacher's logprobs."""
    log = recorded()
    with monkeypatch.context() as patch:
        from rollbook.train.step import teachers

        passed = teachers.passed
        patch.setattr(teachers, "passed", lambda *given: passed(*given) + np.float32(0.01))
        fabric.train(log, _config(TAUGHT, steps=1))
    assert replay_step(log, 0).differs_in == "teacher_logprobs"


def test_a_teacher_that_is_gone(recorded: Stores) -> None:
    """The replay says what is missing."""
    log = recorded()
    fabric.train(log, _config(TAUGHT, steps=1))
    shutil.rmtree(log.path / _checkpoints(log)[0].path)
    with pytest.raises((ModelError, TrainError), match="actor\\.teacher"):
        replay_step(log, 0)


def _with_tokenizer(folder: Path, tokens: dict[str, int]) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    shutil.copytree(fabric.untied_folder(), folder)
    Tokenizer(WordLevel(tokens, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def test_another_tokenizer_is_refused(recorded: Stores, tmp_path: Path) -> None:
    """By name, before anything is written; one that only knows more tokens is taken."""
    log = recorded()
    policy = _with_tokenizer(tmp_path / "policy", {"a": 0, "b": 1})
    more = _with_tokenizer(tmp_path / "more", {"a": 0, "b": 1, "c": 2})
    other = _with_tokenizer(tmp_path / "other", {"a": 1, "b": 0})
    with pytest.raises(
        TrainError, match=r"other has another tokenizer than the policy: id 0 is 'a' to the policy"
    ):
        fabric.train(log, _config(TAUGHT, {"model": str(other)}, model=str(policy)))
    assert _checkpoints(log) == []
    fabric.train(log, _config(TAUGHT, {"model": str(more)}, model=str(policy), steps=1))
    assert len(_checkpoints(log)) == 1


@pytest.mark.parametrize(
    ("algorithm", "teachers", "reason"),
    [
        (TAUGHT, [], "learns from a teacher here: say which"),
        ({"name": "grpo"}, [{"version": 0}], "asks for none: set algorithm.teacher_kl"),
        (TAUGHT, [{}], r"exactly one of model, version and engine \(got none\)"),
        (TAUGHT, [{"version": 0, "model": "m"}], r"\(got model and version\)"),
        (TAUGHT, [{"model": "m", "run": "r"}], "run and policy go with version"),
        (TAUGHT, [{"model": "m"}, {"model": "n"}], "each of several has a name of its own"),
        (TAUGHT, [{"name": "a", "model": "m"}, {"name": "b", "model": "n"}], "let it be the last"),
        (TAUGHT, [{"engine": "http://127.0.0.1:1", "apart": True}], "process of its own already"),
        (TAUGHT | {"teacher_kl": 0, "teacher_discount": 0.5}, [], "set teacher_kl above 0"),
        (ALONE | {"reward_clip": [0, 1]}, [{"version": 0}], "is about rewards, and distillation has none"),
    ],
)
def test_what_is_refused(algorithm: dict[str, Any], teachers: list[dict[str, Any]], reason: str) -> None:
    """The configuration says why."""
    with pytest.raises(ConfigError, match=reason):
        fabric.config(fabric.GRPO, algorithm=algorithm, teacher=teachers)


def test_a_version_that_is_not_there(recorded: Stores) -> None:
    """The error says which there are."""
    with pytest.raises(TrainError, match=r"no checkpoint of that version of policy 'actor' \(it has: 0\)"):
        fabric.train(recorded(), _config(TAUGHT, {"version": 7}))


def test_in_place_it_has_no_optimizer(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is weights alone: neither gradients nor moments."""
    made: list[Any] = []
    begin = TrainablePolicy.__init__

    def begins(self: Any, shape: Any, optimizer: Any, how: Any) -> None:
        made.append((shape.hidden, how.trains))
        begin(self, shape, optimizer, how)

    monkeypatch.setattr(TrainablePolicy, "__init__", begins)
    fabric.train(recorded(), _config(TAUGHT, steps=1))
    assert made == [(32, True), (48, False)]
