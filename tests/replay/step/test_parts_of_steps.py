"""`rollbook replay step --from --to --sample --group --micro-batch --no-model`: parts of a step."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook.replay.step.partial import Part, chosen
from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import Verdict
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import StepVectors

Stores = Callable[..., Store]
GRPO_STEP = 12


@pytest.fixture(scope="module")
def with_vectors(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The trained store, and a further GRPO step whose logprobs and losses are recorded."""
    import shutil

    from rollbook import store as rb

    log = rb.open(shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("vectors") / "store"))
    fabric.append(log, fabric.rollout_records(2, 4, first=6, version=12))
    record = {"vectors": ["logprobs", "losses", "values", "entropies"]}
    fabric.train(log, fabric.config(fabric.GRPO, seed=5, steps=1, record=record))
    return log


def _vectors(log: Store) -> dict[str, Any]:
    records = [e.record for e in log.events_of([StepVectors.KIND])]
    return {r.stage: r for r in records if isinstance(r, StepVectors)}


def test_what_is_recorded(with_vectors: Store) -> None:
    """Of each stage that the step has, a number for each trained token; of others nothing."""
    records = _vectors(with_vectors)
    tokens = fabric.steps_of(with_vectors).steps[GRPO_STEP].committed.metrics["trained_tokens"]
    assert set(records) == {"logprobs", "losses", "entropies"}
    entropies = np.frombuffer(base64.b64decode(records["entropies"].values), "<f4").astype(np.float64)
    metrics = fabric.steps_of(with_vectors).steps[GRPO_STEP].committed.metrics
    assert entropies.mean() == pytest.approx(metrics["entropy"], rel=1e-6)
    assert len(set(entropies.tolist())) > 10
    for record in records.values():
        values = np.frombuffer(base64.b64decode(record.values), "<f4")
        assert (len(values), record.step, record.attempt) == (tokens, GRPO_STEP, 1)
        assert np.isfinite(values).all()


def test_up_to_the_losses_by_the_log_alone(with_vectors: Store) -> None:
    """Without a model, from recorded logprobs: every stage up to the losses is as recorded."""
    result = replay_step(with_vectors, GRPO_STEP, part=Part(model=False))
    assert result.from_version is None
    assert list(result.stages) == [
        *("training", "selection", "samples", "old_logprobs", "rewards", "advantages"),
        *("logprobs", "losses", "evidence"),
    ]
    assert {stage.verdict for stage in result.stages.values()} == {Verdict.equal}


def test_by_the_log_alone_a_changed_reward_is_found(
    with_vectors: Store, tamper: Tamper, tmp_path: Path
) -> None:
    """What a model is not needed for is proven without one."""
    import shutil

    from rollbook import store as rb

    log = rb.open(shutil.copytree(with_vectors.path, tmp_path / "copy"))
    ref = fabric.steps_of(log).steps[GRPO_STEP].planned.samples[0]
    tamper.event(
        log,
        "reward.assigned",
        lambda r: replace(r, reward=r.reward + 0.25),
        trajectory_id=ref["trajectory_id"],
    )
    result = replay_step(log, GRPO_STEP, part=Part(model=False))
    assert result.differs_in == "rewards"
    assert result.stages["losses"].verdict == Verdict.differs
    place = result.stages["rewards"].place
    assert place is not None
    assert (place.sample, place.trajectory_id) == (0, ref["trajectory_id"])


def test_a_token_is_named_with_both_values(with_vectors: Store, tamper: Tamper, tmp_path: Path) -> None:
    """With vectors the first token that differs: its sample, turn and place, both values, and ulps apart."""
    import shutil

    from rollbook import store as rb

    log = rb.open(shutil.copytree(with_vectors.path, tmp_path / "copy"))
    own = np.frombuffer(base64.b64decode(_vectors(log)["logprobs"].values), "<f4").copy()
    was = float(own[2])
    own[2] = np.nextafter(np.nextafter(own[2], np.float32(0)), np.float32(0))
    changed = base64.b64encode(own.tobytes()).decode()
    tamper.event(log, "step.vectors", lambda r: replace(r, values=changed), stage="logprobs")
    tamper.event(
        log,
        "step.committed",
        lambda r: replace(r, digests=r.digests | {"logprobs": "0" * 64}),
        step=GRPO_STEP,
    )
    result = replay_step(log, GRPO_STEP)
    assert result.differs_in == "logprobs"
    place = result.stages["logprobs"].place
    assert place is not None
    assert (place.sample, place.ulps) == (0, 2)
    assert (place.recorded, place.replayed) == (float(own[2]), was)
    batch = result.stages["samples"]
    assert batch.verdict == Verdict.equal
    assert place.turn_id is not None
    assert place.token is not None
    assert "2 ulps apart" in result.stages["logprobs"].why


def test_a_forged_entropy_is_found(with_vectors: Store, tamper: Tamper, tmp_path: Path) -> None:
    """It has no digest of its own, and is as exact as the logprobs that it was computed with."""
    import shutil

    from rollbook import store as rb

    log = rb.open(shutil.copytree(with_vectors.path, tmp_path / "copy"))
    own = np.frombuffer(base64.b64decode(_vectors(log)["entropies"].values), "<f4").copy()
    own[3] += 1
    changed = base64.b64encode(own.tobytes()).decode()
    tamper.event(log, "step.vectors", lambda r: replace(r, values=changed), stage="entropies")
    assert replay_step(with_vectors, GRPO_STEP).equal
    result = replay_step(log, GRPO_STEP)
    assert result.differs_in == "evidence"
    assert "vectors of entropies" in result.stages["evidence"].why


def test_some_samples(trained: Stores) -> None:
    """Of one sample its hashes are compared, after a pass over its micro-batch alone, which gives the same
    bits as the training's pass did."""
    log = trained()
    for samples in (frozenset({0}), frozenset({3, 7})):
        result = replay_step(log, 11, part=Part(samples=samples))
        assert list(result.stages)[-6:] == [
            *("samples", "old_logprobs", "rewards", "advantages", "logprobs", "losses")
        ]
        assert {stage.verdict for stage in result.stages.values()} == {Verdict.equal}


def test_a_sample_that_differs(trained: Stores, tamper: Tamper) -> None:
    """Of a step with a changed logprob only the sample that has it differs."""
    log = trained()
    turn_id = fabric.steps_of(log).steps[11].planned.samples[2]["turn_id"]

    def change(record: Any) -> Any:
        logprobs = record.logprobs.copy()
        logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
        return replace(record, logprobs=logprobs)

    tamper.event(log, "turn.completed", change, turn_id=turn_id)
    result, other = (replay_step(log, 11, part=Part(samples=frozenset({at}))) for at in (2, 0))
    assert (result.differs_in, other.differs_in) == ("old_logprobs", None)
    place = result.stages["old_logprobs"].place
    assert place is not None
    assert (place.sample, place.turn_id) == (2, turn_id)


def test_from_one_stage_to_another(trained: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Only these are shown and judged; beyond the passes all of the step is run."""
    log = trained()
    for last, expected in (("rewards", ["samples", "old_logprobs", "rewards"]), ("samples", ["samples"])):
        expected = [*expected, "evidence"]
        code, out, _ = cli(
            "replay", "step", 11, "--store", log.path, "--from", "samples", "--to", last, "--json"
        )
        assert (code, list(orjson.loads(out)["stages"])) == (0, expected)
    code, out, _ = cli("replay", "step", 11, "--store", log.path, "--from", "gradients", "--json")
    assert (code, list(orjson.loads(out)["stages"])) == (
        0,
        ["gradients", "optimizer", "weights", "metrics", "evidence", "checkpoint", "backed"],
    )


def test_what_is_not_there_is_said(trained: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Unknown stages, samples, groups and micro-batches; what only a model gives; what is of all samples."""
    log = trained()
    for options, words in (
        (("--to", "weight"), "there is no stage 'weight'; there are training, input_weights"),
        (("--sample", "99"), "step 11 has no sample '99'"),
        (("--group", "nobody"), "no sample of group 'nobody': its groups are g"),
        (("--micro-batch", "9"), "no micro-batch 9: it has"),
        (("--no-model",), "recorded no logprobs ([record] vectors of a CONFIG)"),
        (("--sample", "0", "--to", "gradients"), "some samples are replayed up to losses"),
        (("--no-model", "--to", "weights"), "the log alone is replayed up to losses"),
    ):
        code, _, err = cli("replay", "step", 11, "--store", log.path, *options)
        assert code == 2, options
        assert words in " ".join(err.split()), options


def test_samples_by_the_end_of_an_id(trained: Stores) -> None:
    """A leaf turn's, or a trajectory's; and by place, group and micro-batch together."""
    plan = fabric.steps_of(trained()).steps[11].planned
    turn, trajectory = plan.samples[1]["turn_id"], plan.samples[4]["trajectory_id"]
    indices = [i for i, ref in enumerate(plan.samples) if ref["trajectory_id"] == trajectory]
    assert chosen(plan, {}, samples=[turn]) == {1}
    assert chosen(plan, {}, samples=[trajectory, "0"]) == {0, *indices}
    groups = {ref["trajectory_id"]: ref["trajectory_id"].partition(".")[0] for ref in plan.samples}
    first = groups[plan.samples[0]["trajectory_id"]]
    in_group = {i for i, ref in enumerate(plan.samples) if groups[ref["trajectory_id"]] == first}
    assert chosen(plan, groups, groups=[first], micro_batches=[0]) == in_group | set(plan.partition[0][0])
    assert chosen(plan, {}) is None
    with pytest.raises(ReplayError, match="has no sample '1234'"):
        chosen(plan, {}, samples=["1234"])
