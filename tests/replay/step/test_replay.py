"""`rollbook replay step`: the log alone gives every past step again, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import Verdict
from rollbook.store import Store
from rollbook.store.errors import CorruptionError, ModelError, ReplayError, TrainError
from rollbook.store.events import RewardAssigned, TurnDelivered
from rollbook.train.batches.manifest_batch import samples_at_cut

Stores = Callable[..., Store]


# Bit for bit --------------------------------------------------------------------------------------


@pytest.mark.more_but("0-*", "7-*", "10-*")
@pytest.mark.parametrize(
    ("step", "base", "reran"),
    [
        (0, 0, [0]),
        (2, 0, [0, 1, 2]),
        (4, 4, [4]),
        (7, 4, [4, 5, 6, 7]),
        (8, 8, [8]),
        (9, 9, [9]),
        (10, 9, [9, 10]),
        (11, 11, [11]),
    ],
)
def test_every_step_replays(trained: Stores, step: int, base: int, reran: list[int]) -> None:
    """Supervised (to 8) and GRPO steps (from 9) equal the record in every stage, from the nearest base."""
    log = trained()
    result = replay_step(log, step)
    assert (result.from_version, result.reran, result.policy_version) == (base, reran, step)
    written = ["checkpoint"] if step + 1 in (4, 8, 9, 11, 12) else []
    written += ["backed"] if {step, step + 1} & {0, 4, 8, 9, 11, 12} else []
    inputs, computed = fabric.EVERY_STEPS_STAGES[:3], fabric.EVERY_STEPS_STAGES[3:]
    assert list(result.stages) == [
        *("training", *inputs, "selection", "schedule", *computed, "metrics", "evidence", *written)
    ]
    assert {stage.verdict for stage in result.stages.values()} == {Verdict.equal}
    of_digests = [stage for name, stage in result.stages.items() if name != "evidence"]
    assert all(stage.recorded == stage.replayed != None for stage in of_digests)  # noqa: E711
    assert result.bit_for_bit
    assert (result.differs_at_step, result.differs_in, result.environment) == (None, None, [])
    assert result.metrics == fabric.computed(fabric.steps_of(log).steps[step].committed.metrics)


@pytest.mark.more
def test_a_fresh_process_replays(trained: Stores) -> None:
    """`rollbook replay step --json` in processes of their own: exit code 0, every stage equal."""
    log = trained()
    steps = (6, 10)
    running = [fabric.start_cli("replay", "step", n, "--store", log.path, "--json") for n in steps]
    for step, process in zip(steps, running, strict=True):
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        values = orjson.loads(out)
        assert values["bit_for_bit"] is True
        assert values["step"] == step
        assert values["environment"] == []
        expected = fabric.steps_of(log).steps[step]
        recorded = expected.planned.input_digests | expected.committed.digests
        for stage in fabric.EVERY_STEPS_STAGES:
            entry = values["stages"][stage]
            assert (entry["recorded"], entry["replayed"], entry["verdict"]) == (
                *(recorded[stage], recorded[stage], "equal"),
            )


def test_only_the_store_is_needed(trained: Stores, tmp_path: Path) -> None:
    """A moved store replays: nothing outside it is read, and nothing in it is written."""
    log = trained()
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    log.path.rename(moved)
    before = {f: f.read_bytes() for f in moved.rglob("*") if f.is_file()}
    from rollbook import store

    assert replay_step(store.open(moved), 11).bit_for_bit
    assert {f: f.read_bytes() for f in moved.rglob("*") if f.is_file()} == before


def test_a_step_of_a_crashed_run_replays(trained: Stores) -> None:
    """Steps whose first attempt never committed, and drops, replay from the attempt that did."""
    log = trained()
    flat = [RewardAssigned(f"g7.{i}", None, 1.0) for i in range(4)]
    fabric.append(log, fabric.rollout_records(4, 4, first=6) + flat)
    settings = fabric.config(fabric.GRPO, seed=5, steps=2)
    with pytest.MonkeyPatch.context() as patch:

        def killed(*_: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("rollbook.train.loop.trainer.run_step", killed)
        with pytest.raises(KeyboardInterrupt):
            fabric.train(log, settings, "tail")
    fabric.train(log, settings, "tail")
    for step in (12, 13):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in
        assert result.attempt == (2 if step == 12 else 1)


def test_a_cut_gives_the_same_batch_every_time(trained: Stores) -> None:
    """Materializing a step's cut twice gives identical digests, those of the record."""
    log = trained()
    for step in fabric.steps_of(log).steps.values():
        first, second = (
            fabric.batch_of(step.planned, samples_at_cut(log, step.planned, "demo")).digests()
            for _ in range(2)
        )
        assert first == second == {stage: step.committed.digests[stage] for stage in first}


def test_what_comes_later_changes_nothing(trained: Stores) -> None:
    """Rewards, deliveries and trajectories recorded after a step leave its replay as it was."""
    log = trained()
    late = [RewardAssigned("g0.0", None, 99.0), TurnDelivered("g0.0", "g0.0.0", "echoed")]
    fabric.append(log, late + fabric.rollout_records(2, 4, first=6))
    for step in (9, 10):
        assert replay_step(log, step).bit_for_bit
    assert log.trajectories()["g0.0"].reward() == 99.0


def test_a_late_reward_inside_the_cut_was_trained(trained: Stores) -> None:
    """A reward after the finish but before the plan is what the step used, and what it replays with."""
    log = trained()
    fabric.append(log, fabric.rollout_records(2, 4, first=6, version=12))
    fabric.append(log, [RewardAssigned("g6.1", None, 5.0), RewardAssigned("g7.2", None, -5.0)])
    fabric.train(log, fabric.config(fabric.GRPO, seed=5, steps=1))
    result = replay_step(log, 12)
    assert result.bit_for_bit, result.differs_in
    rewards = [s.reward for s in samples_at_cut(log, fabric.steps_of(log).steps[12].planned, "demo").values()]
    assert {5.0, -5.0} <= set(rewards)


# Which step ---------------------------------------------------------------------------------------


def test_no_such_step(trained: Stores, cli: Callable[..., Any]) -> None:
    """A step that no run committed, and a run that is not there, are exit code 2; what there is is named."""
    log = trained()
    for arguments, error in (
        (("99",), "no committed step 99"),
        (("3", "--run", "nobody"), "no run 'nobody'; there are: demo"),
    ):
        code, out, err = cli("replay", "step", *arguments, "--store", log.path)
        assert (code, out) == (2, "")
        assert error in err
    with pytest.raises(ReplayError, match="of policy 'critic'"):
        replay_step(log, 3, policy="critic")


def test_a_planned_step_cannot_be_replayed(trained: Stores) -> None:
    """A step that never committed has no result to hold a replay against."""
    log = trained()
    fabric.append(log, [fabric.planned(12, 12)], "train")
    with pytest.raises(ReplayError, match="no committed step 12"):
        replay_step(log, 12)


def test_two_runs_with_the_same_step(trained: Stores, cli: Callable[..., Any]) -> None:
    """Where several runs have the step, the error names them, and --run chooses one."""
    log = trained()
    fabric.append(log, fabric.teacher_records(6, "other"), "serve2", "other")
    fabric.train(log, fabric.config(fabric.SFT, run="other", steps=2, seed=8), lane="train2")
    code, _, err = cli("replay", "step", 1, "--store", log.path)
    assert code == 2
    assert "runs demo, other each have a step 1" in err
    assert "--run" in err
    for run in ("demo", "other"):
        code, out, _ = cli("replay", "step", 1, "--store", log.path, "--run", run, "--json")
        values = orjson.loads(out)
        assert (code, values["run"], values["bit_for_bit"]) == (0, run, True)
    assert cli("replay", "step", 8, "--store", log.path)[0] == 0, "only one run has a step 8"


def test_each_stage_and_the_verdict_are_printed(
    trained: Stores, tamper: Tamper, cli: Callable[..., Any]
) -> None:
    """For people: each stage, equal or differs, and the verdict with the step and stage."""
    log = trained()
    code, out, _ = cli("replay", "step", 5, "--store", log.path)
    assert code == 0
    assert "step 5: bit for bit\n" in out
    assert out.count("equal") == len(fabric.EVERY_STEPS_STAGES) + 5
    tamper.checkpoint(log, 4, "weights")
    code, out, _ = cli("replay", "step", 5, "--store", log.path)
    assert code == 1
    assert "step 5: differs, first at step 4 in stage input_weights" in " ".join(out.split())


# What is gone -------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_gone(trained: Stores, cli: Callable[..., Any]) -> None:
    """A checkpoint folder that is missing is passed over for one before it; without any it is exit code 2."""
    log = trained()
    shutil.rmtree(log.path / "checkpoints/demo/actor/v00000004")
    result = replay_step(log, 4)
    assert (result.bit_for_bit, result.from_version) == (True, 0)
    assert "v00000004" in result.passed_over[0]
    assert replay_step(log, 3).stages["checkpoint"].verdict == Verdict.not_proven
    shutil.rmtree(log.path / "checkpoints/demo/actor/v00000000")
    code, _, err = cli("replay", "step", 6, "--store", log.path)
    assert code == 2
    assert "v00000000" in err
    assert "v00000004" in err
    assert replay_step(log, 8).bit_for_bit


def test_a_lane_that_is_gone(trained: Stores, cli: Callable[..., Any]) -> None:
    """Without the lane its samples are in, a step cannot be replayed: exit code 2 and its name."""
    log = trained()
    shutil.rmtree(log.path / "lanes/serve")
    code, _, err = cli("replay", "step", 6, "--store", log.path)
    assert code == 2
    assert "serve" in err


def test_a_folder_that_is_no_store_exits_with_2(cli: Callable[..., Any], tmp_path: Path) -> None:
    """A folder that is no store is exit code 2."""
    code, _, err = cli("replay", "step", 0, "--store", tmp_path)
    assert code == 2
    assert "not a Rollbook store" in err


def test_errors_are_of_the_documented_kinds(trained: Stores) -> None:
    """What replaying raises is in the tree that the command line turns into exit code 2."""
    from rollbook.store.errors import RollbookError

    for kind in (CorruptionError, ModelError, ReplayError, TrainError):
        assert issubclass(kind, RollbookError)
    with pytest.raises(RollbookError):
        replay_step(trained(), -1)
