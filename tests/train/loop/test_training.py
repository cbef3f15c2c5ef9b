"""`rollbook train`: steps as events, crashes that leave no trace in the weights, offline and online."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import trainer_records

from rollbook.store import Store
from rollbook.store.catalog import Catalog
from rollbook.store.digest import is_tree
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import CheckpointWritten, PolicyPublished, RunOpened, StepCommitted, StepPlanned
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.config.phase import family_names
from rollbook.train.select.recipe import is_candidate
from rollbook.train.select.samples import all_samples

INPUT_STAGES = ("input_weights", "input_optimizer", "rng")
Stores = Callable[..., Store]


def _final(log: Store, run: str = "demo") -> tuple[int, str, str]:
    """The last committed step's version, weights digest and optimizer digest."""
    last = [e.record for e in log.events() if isinstance(e.record, StepCommitted) and e.run == run][-1]
    return last.policy_version, last.digests["weights"], last.digests["optimizer"]


# What a run writes --------------------------------------------------------------------------------


def test_supervised_training_lowers_the_loss(trained: Stores) -> None:
    """Supervised training learns: the last steps' loss is well below the first's, which is near chance."""
    losses = [s.metrics["loss"] for s in trainer_records(trained(), StepCommitted)[:9]]
    assert losses[0] > 0.9 * math.log(100)
    assert max(losses[-3:]) < 0.8 * losses[0]


def test_every_step_is_planned_and_then_committed(trained: Stores) -> None:
    """Plans and commits alternate, with rising steps and versions, without gaps, attempts at 1."""
    records = trainer_records(trained(), StepPlanned, StepCommitted)
    assert [r.KIND for r in records] == ["step.planned", "step.committed"] * 12
    assert [r.step for r in records] == [n for n in range(12) for _ in range(2)]
    assert [r.policy_version for r in records] == [n + k for n in range(12) for k in range(2)]
    assert {r.attempt for r in records} == {1}
    assert {r.policy for r in records} == {"actor"}


def test_the_manifest_is_complete(trained: Stores) -> None:
    """Every field that decides a step's bits is in its plan, with the configuration's values."""
    log = trained()
    plans, known = trainer_records(log, StepPlanned), log.head()["serve"]
    for plan in plans:
        sft = plan.step < 9
        values = fabric.config(fabric.SFT if sft else fabric.GRPO)
        assert plan.phase == family_names(values, "cut")[0]
        assert plan.algorithm == values.algorithm.model_dump(mode="json")
        assert plan.optimizer == values.optimizer.model_dump(mode="json")
        assert plan.recipe == values.recipe.model_dump(mode="json")
        assert f"serve={known}" in plan.cut
        assert list(plan.input_digests) == list(INPUT_STAGES)
        assert [i for part in plan.partition[0] for i in part] == list(range(len(plan.samples)))
        assert max(map(len, plan.partition[0])) == (4 if sft else 5)
        assert plan.environment["threads"] == 1
        assert plan.environment["deterministic"] is True
        assert plan.environment["packages"]["megatron-core"] == "0.16.1"
    assert len({p.seed for p in plans}) == 12
    rates = [round(p.learning_rate, 12) for p in plans]
    # Warm-up of 2 steps, constant, 3 steps down to min_lr; the next phase warms up anew.
    assert rates[:9] == [0.005, *[0.01] * 5, 0.007, 0.004, 0.001]
    assert rates[9:] == [0.0005, 0.001, 0.001]


def test_every_stage_has_a_digest(trained: Stores) -> None:
    """A commit holds a digest of each stage after the input ones, and the input follows the output."""
    log = trained()
    commits, plans = trainer_records(log, StepCommitted), trainer_records(log, StepPlanned)
    for done in commits:
        assert set(done.digests) == set(fabric.EVERY_STEPS_STAGES) - set(INPUT_STAGES)
        trees = {stage for stage, digest in done.digests.items() if is_tree(digest)}
        assert trees == {"gradients", "optimizer", "weights"}
        assert all(len(d.removeprefix("tree-")) == 64 for d in done.digests.values())
    for before, plan in zip(commits, plans[1:], strict=False):
        assert plan.input_digests["input_weights"] == before.digests["weights"]
        if plan.step != 9:
            assert plan.input_digests["input_optimizer"] == before.digests["optimizer"]
    assert plans[9].input_digests["input_optimizer"] == plans[0].input_digests["input_optimizer"], (
        "a new phase starts Adam anew"
    )


def test_checkpoints_are_what_the_log_says(trained: Stores) -> None:
    """Checkpoints come every so often and at each end; each loads and has the digest of its version."""
    log = trained()
    written, published = trainer_records(log, CheckpointWritten), trainer_records(log, PolicyPublished)
    assert [c.policy_version for c in written] == [0, 4, 8, 9, 11, 12]
    assert [(p.policy_version, p.path) for p in published] == [(c.policy_version, c.path) for c in written]
    weights = {s.policy_version: s.digests["weights"] for s in trainer_records(log, StepCommitted)}
    for record in written[1:]:
        assert record.weights_digest == weights[record.policy_version]
        assert read_checkpoint(log.path / record.path).optimizer is not None
    checkpoints = Catalog.of(log.path).rows()["checkpoints"]
    assert [row["policy_version"] for row in checkpoints] == [0, 4, 8, 9, 11, 12]
    opened = trainer_records(log, RunOpened)
    assert [o.config["algorithm"]["name"] for o in opened] == ["sft", "grpo"]


def test_epochs_are_counted_out(trained: Stores) -> None:
    """9 steps of 6 over 18 samples are 3 epochs: every teacher sample three times, nothing else."""
    log = trained()
    plans = trainer_records(log, StepPlanned)[:9]
    used = Counter(ref["turn_id"] for plan in plans for ref in plan.samples)
    assert used == {f"teach{i}.1": 3 for i in range(18)}


def test_offline_grpo_takes_whole_groups_once(trained: Stores) -> None:
    """6 groups in 3 steps of 2: every sample of every group once, with advantages that differ."""
    log = trained()
    plans = trainer_records(log, StepPlanned)[9:]
    used = [ref["turn_id"] for plan in plans for ref in plan.samples]
    expected = [s.leaf_turn_id for s in all_samples(log.trajectories().values()) if s.split == "train"]
    assert sorted(used) == sorted(expected)
    groups = [{ref["trajectory_id"].split(".")[0] for ref in plan.samples} for plan in plans]
    assert groups == [{"g0", "g1"}, {"g2", "g3"}, {"g4", "g5"}]
    for done in trainer_records(log, StepCommitted)[9:]:
        assert done.metrics["gradient_norm"] > 0
        assert done.metrics["reward"] == pytest.approx(0.75, abs=0.2)
        assert done.metrics["stale_logprob_gap"] > 0


def test_evaluation_is_never_trained(trained: Stores) -> None:
    """No step of any phase names a trajectory of the eval split."""
    log = trained()
    evaluated = {s.trajectory_id for s in all_samples(log.trajectories().values()) if s.split == "eval"}
    assert evaluated == {"held-out"}
    named = {ref["trajectory_id"] for plan in trainer_records(log, StepPlanned) for ref in plan.samples}
    assert not named & evaluated


def test_a_run_is_decided_by_its_log(recorded: Stores, trained: Stores) -> None:
    """The same configuration on the same log gives the same bits; another seed does not."""
    again, other = recorded("again"), recorded("other")
    fabric.train(again, fabric.config(fabric.SFT))
    fabric.train(other, fabric.config(fabric.SFT, seed=4))
    expected = trainer_records(trained(), StepCommitted)[8].digests
    assert trainer_records(again, StepCommitted)[8].digests == expected
    assert trainer_records(other, StepCommitted)[8].digests["weights"] != expected["weights"]


def test_a_finished_run_has_nothing_to_do(trained: Stores) -> None:
    """Training again takes no step and writes no checkpoint; more `steps` take just the rest."""
    log = trained()
    before = len(trainer_records(log, StepPlanned, CheckpointWritten))
    fabric.train(log, fabric.config(fabric.GRPO))
    assert len(trainer_records(log, StepPlanned, CheckpointWritten)) == before
    fabric.append(log, fabric.rollout_records(2, 4, first=6))
    with pytest.raises(TrainError, match=r"3 of 4 steps; the log at serve=402,train=27 fills no further one"):
        fabric.train(log, fabric.config(fabric.GRPO, steps=4))
    assert _final(log)[0] == 12, "the phase keeps the cut it began with, which holds no more groups"


# Online -------------------------------------------------------------------------------------------


def test_online_waits_for_what_is_to_come(recorded: Stores) -> None:
    """The tail goes on with groups that are recorded after it has read everything; then patience ends."""
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=9, idle_timeout_s=0.3, recipe={"max_staleness": 3})
    with pytest.raises(TrainError, match=r"no complete batch for 0\.3 s"):
        fabric.train(log, settings, "tail")
    assert _final(log)[0] == 3
    fabric.append(log, fabric.rollout_records(1, 4, first=6, version=0))
    fabric.append(log, fabric.rollout_records(2, 4, first=7, version=3))
    with pytest.raises(TrainError):
        fabric.train(log, settings, "tail")
    assert _final(log)[0] == 4
    plan = trainer_records(log, StepPlanned)[-1]
    candidates = [s for s in all_samples(log.trajectories().values()) if is_candidate(s, settings.recipe)]
    groups = {s.leaf_turn_id: s.group for s in candidates}
    assert [groups[ref["turn_id"]] for ref in plan.samples] == ["g6"] * 6 + ["g7"] * 6


# Refusals -----------------------------------------------------------------------------------------


def test_a_lane_that_is_being_written(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Another writer of the lane is exit code 2 with the remedy; another lane's name is one."""
    log = recorded()
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=1)))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    with log.writer("train"):
        code, _, err = cli(*command)
        assert code == 2
        assert "being written by process" in err
        assert "--lane" in err
        assert cli(*command, "--lane", "train2")[0] == 0
    assert fabric.steps_of(log).next_step == 1


def test_inputs_that_cannot_be_used(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """No store, no model, a cut that is not held, nothing to train on: exit code 2 and what to mend."""
    log = recorded()
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT)))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    for arguments, message in (
        (("train", tmp_path / "train.toml", "--store", tmp_path / "none"), "not a Rollbook store"),
        ((*command, "--set", f"model={tmp_path}"), "holds no config.json"),
        ((*command, "--as-of", "serve=99999"), "holds 99999 events"),
        ((*command, "--as-of", "serve=0"), "fills no further one: there is no trajectory"),
        ((*command, "--set", "run=nobody"), "43 are of run 'demo'"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2, arguments
        assert message in err
    assert fabric.steps_of(log).next_step == 0


def test_one_trainer_a_policy(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A second trainer of the same policy and run is refused, whatever lane it names."""
    log = recorded()
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=1)))
    with log.claim("training policy actor of run demo", "wait"):
        code, _, err = cli("train", tmp_path / "train.toml", "--store", log.path, "--lane", "train2")
    assert code == 2
    assert "is being done by process" in err
    assert fabric.steps_of(log).next_step == 0


@pytest.mark.more
def test_configurations_may_alternate(recorded: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    """A, then B, then A again: A goes on from B's weights, with Adam anew; a finished A rests."""
    log = recorded()
    first, second = fabric.config(fabric.SFT, steps=2), fabric.config(fabric.SFT, steps=2, seed=9)
    fabric.train(log, first)
    fabric.train(log, second)
    fabric.train(log, first)
    assert "nothing to do" in capsys.readouterr().err
    assert _final(log)[0] == 4
    fabric.train(log, fabric.config(fabric.SFT, steps=3))
    plans, commits = trainer_records(log, StepPlanned), trainer_records(log, StepCommitted)
    assert [p.phase.partition("#")[2] for p in plans] == ["", "", "", "", "2"]
    assert plans[4].phase.partition("#")[0] == plans[0].phase
    assert plans[4].input_digests["input_weights"] == commits[3].digests["weights"]
    assert plans[4].input_digests["input_optimizer"] == plans[0].input_digests["input_optimizer"]


def test_a_cut_that_contradicts_the_phase(trained: Stores) -> None:
    """A configuration goes on at its own cut; another `--as-of` is an error, as it is with the tail."""
    log = trained()
    with pytest.raises(ConfigError, match="goes on there"):
        fabric.train(log, fabric.config(fabric.GRPO, steps=4), as_of="serve=10")
    with pytest.raises(ConfigError, match="the tail has no cut"):
        fabric.train(log, fabric.config(fabric.GRPO), "tail", as_of="serve=10")


def test_a_checkpoint_in_bfloat16_is_widened(recorded: Stores, tmp_path: Path) -> None:
    """A bf16 model trains in float32: version 0 holds the same numbers, and its config says float32."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "bf16"
    shutil.copytree(fabric.model_folder(), model)
    narrow = {n: t.bfloat16() for n, t in load_file(model / "model.safetensors").items()}
    save_file(narrow, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text((model / "config.json").read_text().replace("float32", "bfloat16"))
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=1, model=str(model)))
    folder = log.path / trainer_records(log, CheckpointWritten)[0].path
    held = read_checkpoint(folder).weights
    assert all(torch.equal(held[n], t.float()) for n, t in narrow.items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
