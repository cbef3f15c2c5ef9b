"""`rollbook replay run` and `rollbook replay weights`, and the search for the first bad step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook.replay.step.step import replay_step
from rollbook.replay.stretch.first_bad import find_first_bad
from rollbook.replay.stretch.rebuild import rebuild
from rollbook.replay.stretch.stretch import Break, chain, history_of, prove_stretch, segments
from rollbook.store import Store
from rollbook.store.errors import InterchangeError, ReplayError
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.train.checkpoints.checkpoint import read_checkpoint

Stores = Callable[..., Store]


def test_a_training_is_proven_from_checkpoint_to_checkpoint(trained: Stores) -> None:
    """Two trainings that follow each other, each step run once, from the checkpoint before it."""
    log = trained()
    history = history_of(log, None, "actor")
    assert segments(history, 0, 99) == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9, 10], [11]]
    assert segments(history, 5, 8) == [[5, 6, 7], [8]]
    counted: list[int] = []
    result = prove_stretch(log, history, 0, 11, done=counted.append)
    assert [step.step for step in result.steps] == list(range(12)) == list(range(sum(counted)))
    assert all(step.replay is not None and step.replay.bit_for_bit for step in result.steps)
    assert [step.replay.reran for step in result.steps if step.replay][5] == [4, 5]
    assert (result.broken, result.equal) == ([], True)


@pytest.mark.more
def test_by_several_processes(trained: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """`--jobs 2` gives the same, in order; exit code 0."""
    code, out, _ = cli("replay", "run", "--store", trained().path, "--from", 3, "--jobs", 2, "--json")
    values = orjson.loads(out)
    assert (code, values["equal"], values["broken"]) == (0, True, [])
    assert [(entry["step"], entry["verdict"]) for entry in values["steps"]] == [
        (step, "bit for bit") for step in range(3, 12)
    ]


def test_a_step_that_differs_ends_its_segment_alone(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """What it leads to is not proven; the next checkpoint's steps are."""
    log = trained()
    tamper.event(
        log, "step.committed", lambda r: replace(r, digests=r.digests | {"losses": "0" * 64}), step=5
    )
    code, out, _ = cli("replay", "run", "--store", log.path, "--json")
    steps = orjson.loads(out)["steps"]
    assert code == 1
    assert [entry["verdict"] for entry in steps[4:9]] == [
        *("bit for bit", "differs", "not proven", "not proven", "bit for bit")
    ]
    assert steps[5]["replay"]["differs_in"] == "losses"
    code, out, _ = cli("replay", "run", "--store", log.path, "--from", 4, "--to", 8)
    printed = " ".join(out.split())
    assert code == 1
    assert "step 5: differs first in stage losses" in printed
    assert "steps 6 to 7: not proven its segment differs from step 5 on" in printed


def test_the_chain_of_digests(trained: Stores, tamper: Tamper) -> None:
    """A step that does not start with what the last one ended with is named without running anything."""
    log = trained()
    assert chain(history_of(log, None, "actor"), range(12)) == []
    was = fabric.steps_of(log).steps[6].committed.digests["weights"]
    tamper.event(
        log,
        "step.planned",
        lambda p: replace(p, input_digests=p.input_digests | {"input_weights": "1" * 64}),
        step=7,
    )
    assert chain(history_of(log, None, "actor"), range(12)) == [Break(7, "input_weights", was, "1" * 64)]


def test_an_erased_trajectory_blocks_only_what_needs_it(trained: Stores) -> None:
    """Its step, and those that can be reached through it alone: the rest is replayed from the checkpoint on
    the other side."""
    log = trained()
    used = fabric.steps_of(log).steps
    ids = [{ref["trajectory_id"] for ref in step.planned.samples} for step in used.values()]
    only = sorted(ids[9] - set.union(*ids[:9], *ids[10:]))[0]
    erase_trajectory(log, only, "asked")
    result = prove_stretch(log, history_of(log, None, "actor"), 8, 11)
    assert [verified.replay is not None for verified in result.steps] == [True, False, False, True]
    assert "were erased (asked)" in result.steps[1].why
    assert "lead through step 9, of which tokens were erased" in result.steps[2].why


def test_from_weights_alone(trained: Stores) -> None:
    """Where no whole checkpoint leads to a step, its own weights prove its passes and its gradients, and it
    is said what they cannot."""
    log = trained()
    record = fabric.checkpoint(10, phase=None, optimizer=None)
    history = history_of(log, None, "actor")
    rebuilt = rebuild(log, history, 10, log.path / "made")
    target = log.path / "checkpoints/demo/actor/v00000010"
    shutil.copytree(log.path / "made", target)
    manifest = orjson.loads((target / "rollbook.json").read_bytes())
    manifest |= {"optimizer_digest": None, "optimizer_tensors": {}}
    (target / "rollbook.json").write_bytes(orjson.dumps(manifest))
    (target / "optimizer.safetensors").unlink()
    claim = replace(record, path="checkpoints/demo/actor/v00000010", weights_digest=rebuilt.weights_digest)
    fabric.append(log, [claim], "train")
    shutil.rmtree(log.path / "checkpoints/demo/actor/v00000009")
    for version in (0, 4, 8):
        shutil.rmtree(log.path / f"checkpoints/demo/actor/v{version:08d}")
    result = replay_step(log, 10)
    assert (result.weights_only, result.from_version, result.equal) == (True, 10, True)
    assert [stage.stage for stage in result.unproven] == ["input_optimizer", "optimizer", "weights"]
    assert {result.stages[s].verdict for s in ("logprobs", "losses", "gradients", "metrics")} == {"equal"}
    with pytest.raises(ReplayError, match="cannot be replayed from any checkpoint"):
        replay_step(log, 9)


# Versions without a checkpoint --------------------------------------------------------------------


def test_a_version_is_rebuilt(
    trained: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Proven step by step, and written as the checkpoint that it would have had; or into the store."""
    log = trained()
    digest = fabric.steps_of(log).steps[6].committed.digests["weights"]
    code, out, _ = cli("replay", "weights", 7, "--store", log.path, "-o", tmp_path / "v7")
    assert code == 0
    printed = " ".join(out.split())
    assert "from the checkpoint of version 4, 3 steps run again, each bit for bit" in printed
    assert digest in printed
    held = read_checkpoint(tmp_path / "v7")
    assert held.optimizer is not None
    with pytest.raises(InterchangeError, match="exists"):
        rebuild(log, history_of(log, None, "actor"), 7, tmp_path / "v7")
    code, out, _ = cli("replay", "weights", 7, "--store", log.path, "--restore", "--json")
    values = orjson.loads(out)
    assert (code, values["weights_digest"], values["proof"]["bit_for_bit"]) == (0, digest, True)
    assert values["path"].endswith("checkpoints/demo/actor/v00000007")
    result = replay_step(log, 7)
    assert (result.from_version, result.bit_for_bit) == (7, True)
    assert replay_step(log, 6).stages["checkpoint"].verdict == "equal"


def test_what_cannot_be_rebuilt(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A version that no step made is exit code 2; one that comes out otherwise is 1, and is not written."""
    log = trained()
    code, _, err = cli("replay", "weights", 99, "--store", log.path)
    assert code == 2
    assert "steps made versions 1 to 12" in " ".join(err.split())
    tamper.event(
        log, "step.committed", lambda r: replace(r, digests=r.digests | {"weights": "0" * 64}), step=5
    )
    code, out, _ = cli("replay", "weights", 7, "--store", log.path, "-o", tmp_path / "v7")
    assert code == 1
    assert "step 5: differs first in stage weights" in " ".join(out.split())
    assert not (tmp_path / "v7").exists()


@pytest.mark.more_but("weights")
@pytest.mark.parametrize("stage", ["weights", "optimizer"])
def test_a_version_that_is_not_proven_is_not_written(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]], tmp_path: Path, stage: str
) -> None:
    """Recorded in another environment, and with another digest: bits are not promised, so that nothing
    differs, and what comes out is not the version. It is not written, nor restored; exit code 3."""
    log = trained()
    tamper.environment(log, processor="abacus")
    tamper.event(log, "step.committed", lambda r: replace(r, digests=r.digests | {stage: "0" * 64}), step=6)
    held = sorted(log.path.glob("checkpoints/*/*/*"))
    for how in (("-o", tmp_path / "v7"), ("--restore",), ("--json",)):
        code, out, _ = cli("replay", "weights", 7, "--store", log.path, *how)
        assert code == 3, out
        assert ("each bit for bit" in out, "rollbook.json" in out) == (False, False)
    values = orjson.loads(out)
    assert (values["proven"], values["path"], values["proof"]["outcome"]) == (False, None, "in part")
    assert values["proof"]["not_compared"]["not proven"] == [stage]
    assert not (tmp_path / "v7").exists()
    assert sorted(log.path.glob("checkpoints/*/*/*")) == held
    printed = " ".join(cli("replay", "weights", 7, "--store", log.path, "--restore")[1].split())
    assert "step 6: equal in part: bit for bit in training to" in printed
    assert "version 7 of policy actor is not proven and nothing was written" in printed
    assert cli("replay", "weights", 6, "--store", log.path, "-o", tmp_path / "v6")[0] == 0


def test_what_was_not_compared_is_said(
    trained: Stores, tamper: Tamper, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Of a stretch, on a machine that makes no promise, whose steps have other digests of their passes:
    nothing is called equal within a tolerance that was not compared. Exit code 3."""
    log = trained()
    tamper.environment(log, processor="abacus")
    passes = ("logprobs", "losses", "gradients")

    def otherwise(event: Any) -> Any:
        record = event.record
        if event.kind != "step.committed":
            return None
        return replace(record, digests=record.digests | dict.fromkeys(passes, "0" * 64))

    assert tamper.rewrite(log, "train", otherwise) == 12
    code, out, _ = cli("replay", "run", "--store", log.path, "--from", 5, "--to", 6)
    printed = " ".join(out.split())
    assert (code, "steps 5 to 6: equal in part: bit for bit in training to advantages" in printed) == (
        3,
        True,
    )
    assert "not compared: logprobs to gradients" in printed
    assert "within" not in printed
    values = orjson.loads(cli("replay", "run", "--store", log.path, "--from", 5, "--to", 6, "--json")[1])
    assert [entry["verdict"] for entry in values["steps"]] == ["in part", "in part"]
    assert {tuple(entry["not_compared"]["not proven"]) for entry in values["steps"]} == {passes}


# The first bad step -------------------------------------------------------------------------------


@pytest.mark.more_but("11")
@pytest.mark.parametrize("bad", [0, 3, 6, 8, 11])
def test_the_first_bad_step_is_found(trained: Stores, tamper: Tamper, bad: int) -> None:
    """Where all steps from one on differ: steps behind checkpoints are bisected, then those between."""
    log = trained()

    def otherwise(record: Any) -> Any:
        return replace(record, digests=record.digests | {"gradients": "0" * 64})

    for step in range(bad, 12):
        tamper.event(log, "step.committed", otherwise, step=step)
    result = find_first_bad(log, history_of(log, None, "actor"), 0, 11)
    assert result.first is not None
    assert (result.first.differs_at_step, result.first.differs_in) == (bad, "gradients")
    assert len(result.ran) <= 1 + 3 + 4


@pytest.mark.more
def test_none_is_bad(trained: Stores) -> None:
    """Then none of those that were run differs."""
    log = trained()
    result = find_first_bad(log, history_of(log, None, "actor"), 0, 11)
    assert (result.first, result.broken) == (None, [])
