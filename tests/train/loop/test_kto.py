"""Kahneman-Tversky optimization: what is trained on, that it learns, and that its steps replay."""

from __future__ import annotations

import dataclasses
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
from rollbook.store.events import EvalFinished, PreferenceAdded, SampleDropped, StepCommitted, StepPlanned
from rollbook.train.select.samples import Sample, all_samples
from rollbook.train.step import experiences

OFFLINE = {
    "steps": 6,
    "micro_batch_size": 4,
    "checkpoint_every": 2,
    "recipe": {"splits": ["teacher"]},
    "optimizer": {"lr": 0.003},
}


def _config(algorithm: dict[str, Any] | None = None, **changes: Any) -> Any:
    keys = {"name": "kto", "batch_size": 6, "beta": 0.5} | (algorithm or {})
    return fabric.config(fabric.GRPO, **OFFLINE | {"algorithm": keys} | changes)


def _labelled(path: Path) -> Store:
    """Twelve conversations of a teacher, of which the second half was liked; one of which nobody said; and
    four that are held out."""
    log = rb.open(path, create=True)
    records: list[Any] = []
    for i in range(12):
        turn = fabric.T([5, 6 + i % 3], [20 if i < 6 else 60, 21 + i % 2], logprobs=None, version=None)
        records += fabric.records(f"t{i:02}", [turn], split="teacher", reward=float(i >= 6))
    unsaid = fabric.T([5], [33], logprobs=None, version=None)
    records += fabric.records("unsaid", [unsaid], split="teacher")
    for i in range(4):
        turn = fabric.T([5, 7], [60 if i else 20, 22 + i], logprobs=None, version=None)
        records += fabric.records(f"e{i}", [turn], split="eval", reward=float(i > 0))
    fabric.append(log, records)
    return log


def _metrics(log: Store) -> list[Any]:
    return [step.metrics for step in records_of(log, StepCommitted)]


def test_labels_in_epochs(tmp_path: Path) -> None:
    """Each labelled sample once an epoch; the loss falls, samples come to be rated as they were labelled,
    against a divergence that is above 0 once the policy moved; and steps replay."""
    log = _labelled(tmp_path / "store")
    fabric.train(log, _config())
    used = [{ref["trajectory_id"] for ref in plan.samples} for plan in records_of(log, StepPlanned)]
    for first in range(0, 6, 2):
        assert len(used[first]) == 6
        assert used[first] | used[first + 1] == {f"t{i:02}" for i in range(12)}
    assert {(d.trajectory_id, d.rule) for d in records_of(log, SampleDropped)} == {("unsaid", "no_reward")}
    metrics = _metrics(log)
    first, last = metrics[0], metrics[-1]
    assert first["loss"] == pytest.approx(0.5), "policy and reference agree: sigma of 0"
    assert (first["kl_reference"], first["desirable_rating"], first["undesirable_rating"]) == (0, 0, 0)
    assert last["loss"] < 0.8 * first["loss"]
    assert last["label_accuracy"] == 1.0
    assert last["desirable_rating"] > 0.1 > -0.1 > last["undesirable_rating"]
    assert max(each["kl_reference"] for each in metrics) > 0
    rows = rb.connect(log.path).execute("select label_accuracy, kl_reference from metrics order by step")
    assert rows.fetchall()[-1] == (1.0, last["kl_reference"])
    committed = records_of(log, StepCommitted)
    assert "kl_reference_point" in committed[0].digests
    for step in (0, 3, 5):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in


def _likelihoods(log: Store, version: int, samples: list[Sample]) -> list[float]:
    """The logprob, by the weights of a version, of what follows the first two tokens of each sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(log.path / f"checkpoints/demo/actor/v{version:08}")
    sums = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
        sums.append(float(logprobs[1:-1].gather(-1, ids[2:, None]).sum()))
    return sums


def test_the_divergence_is_that_of_mismatched_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples that hold the tokens of the batch, each with another one's completion, as transformers sees
    them by both weights; a replay that mixes them otherwise names the stage."""
    seen: list[list[Sample]] = []
    mismatched = experiences.mismatched

    def noted(samples: Any, *others: Any) -> Any:
        mixed, masks = mismatched(samples, *others)
        seen.append([*mixed])
        return mixed, masks

    log = _labelled(tmp_path / "store")
    monkeypatch.setattr(experiences, "mismatched", noted)
    fabric.train(log, _config(steps=3))
    tokens = {s.trajectory_id: s.tokens.tolist() for s in all_samples(log.trajectories().values())}
    for plan, mixed in zip(records_of(log, StepPlanned), seen, strict=True):
        whole = [tokens[ref["trajectory_id"]] for ref in plan.samples]
        expected = [own[:2] + other[2:] for own, other in zip(whole, whole[1:] + whole[:1], strict=True)]
        assert [s.tokens.tolist() for s in mixed] == expected
    then, now = (_likelihoods(log, version, seen[2]) for version in (0, 2))
    expected_mean = sum(b - a for a, b in zip(then, now, strict=True)) / 6
    assert abs(expected_mean) > 1e-3
    assert _metrics(log)[2]["kl_reference"] == pytest.approx(max(expected_mean, 0.0), abs=1e-5)
    monkeypatch.setattr(experiences, "mismatched", lambda samples, masks, context, unit: (samples, masks))
    assert replay_step(log, 2).differs_in == "kl_reference_point"


def test_the_point_of_reference_is_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the batch is cut into micro-batches, padded or packed, the same training but for the last
    bits; without it, another one."""
    parts = experiences.mismatched_parts
    ways: dict[str, Any] = {
        "whole": _config(micro_batch_size=6),
        "single": _config(micro_batch_size=1),
        "packed": _config(micro_batch_size=None, tokens_per_micro_batch=9),
        "zero": _config({"reference_point": "zero"}),
    }
    logs = {name: _labelled(tmp_path / name) for name in ways}
    own = list[str]()
    for name, settings in ways.items():
        monkeypatch.setattr(
            experiences, "mismatched_parts", lambda *of, name=name: own.append(name) or parts(*of)
        )
        fabric.train(logs[name], settings)
    assert own == ["packed"] * 6, "mixed samples that are packed have micro-batches of their own"
    losses = {name: [each["loss"] for each in _metrics(log)] for name, log in logs.items()}
    assert losses["single"] == pytest.approx(losses["whole"], abs=1e-5)
    assert losses["packed"] == pytest.approx(losses["whole"], abs=1e-5)
    assert losses["zero"] != pytest.approx(losses["whole"], abs=1e-4)
    assert [each["kl_reference"] for each in _metrics(logs["zero"])] == [0.0] * 6
    assert "kl_reference_point" not in records_of(logs["zero"], StepCommitted)[0].digests
    assert [replay_step(logs[name], 4).differs_in for name in ("packed", "zero")] == [None, None]


def test_preferences_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen samples are desirable, and rejected ones are not; rewards say nothing. No prompt is completed by
    the other sample of its pair."""
    mixes: list[tuple[Any, ...]] = []
    mismatched = experiences.mismatched
    monkeypatch.setattr(experiences, "mismatched", lambda *of: mixes.append(of) or mismatched(*of))
    log = _labelled(tmp_path / "store")
    fabric.append(log, [PreferenceAdded(f"t{i:02}", f"t{i + 6:02}") for i in range(6)])
    fabric.train(log, _config({"labels": "preferences", "batch_size": 3}))
    pairs = [[ref["trajectory_id"] for ref in plan.samples] for plan in records_of(log, StepPlanned)]
    assert all(
        int(b[1:]) == int(a[1:]) + 6 for step in pairs for a, b in zip(step[::2], step[1::2], strict=True)
    )
    assert _metrics(log)[-1]["label_accuracy"] == 1.0
    assert {unit for _, _, _, unit in mixes} == {2}
    assert replay_step(log, 4).differs_in is None


def test_the_reference_follows(tmp_path: Path) -> None:
    """Every two steps; then policy and reference agree again."""
    log = _labelled(tmp_path / "store")
    fabric.train(log, _config({"ref_update_interval": 2}))
    versions = [plan.algorithm["reference_version"] for plan in records_of(log, StepPlanned)]
    assert versions == [0, 0, 2, 2, 4, 4]
    assert [each["loss"] for each in _metrics(log)][::2] == pytest.approx([0.5] * 3)
    assert replay_step(log, 5).differs_in is None


def test_held_out_labels(tmp_path: Path) -> None:
    """The loss of held-out samples falls too, by one divergence of all of them, whatever the passes."""
    evaluated = []
    for size in (1, 4):
        log = _labelled(tmp_path / f"store{size}")
        fabric.train(log, _config(micro_batch_size=size, evaluation={"every": 6}))
        evaluated.append([dict(record.metrics) for record in records_of(log, EvalFinished)])
    (before, after), other = evaluated
    assert before["loss"] == pytest.approx(0.5)
    assert after["loss"] < before["loss"]
    assert after["label_accuracy"] > 0.5
    for one, two in zip((before, after), other, strict=True):
        assert one == pytest.approx(two, abs=1e-5)


def test_a_restart_goes_on(tmp_path: Path) -> None:
    """The same bits as without the break, from between two checkpoints."""
    whole, broken = _labelled(tmp_path / "whole"), _labelled(tmp_path / "broken")
    fabric.train(whole, _config())
    with fabric.killed_at(3):
        fabric.train(broken, _config())
    fabric.train(broken, _config())
    expected, other = ([s.digests for s in records_of(log, StepCommitted)] for log in (whole, broken))
    assert expected == other


def test_a_forged_label_is_found(tmp_path: Path) -> None:
    """The step's stage `rewards` differs."""
    log = _labelled(tmp_path / "store")
    fabric.train(log, _config(steps=1))
    from rollbook.train.batches import manifest_batch

    of = manifest_batch.samples_of

    def turned(*args: Any, **keys: Any) -> Any:
        for sample in of(*args, **keys):
            yield dataclasses.replace(sample, reward=1.0 - sample.reward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_batch, "samples_of", turned)
        assert replay_step(log, 0).differs_in == "rewards"
