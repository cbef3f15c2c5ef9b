"""Steps that a release took before hashes, schedules and activations were recorded: they replay, and the
training that it left goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.stretch.stretch import chain, history_of, prove_stretch
from rollbook.store import Store
from rollbook.store.digest import is_tree
from rollbook.store.errors import TrainError

UNKNOWN = ["schedule", "evidence"]
"""Stages that it recorded nothing of."""


@pytest.fixture
def before(root: Path, tmp_path: Path) -> Store:
    """A copy of what it left."""
    return rb.open(shutil.copytree(root / "tests/data/trained-1", tmp_path / "store"))


@pytest.mark.more_but("2")
@pytest.mark.parametrize("step", [0, 1, 2])
def test_each_step_replays(before: Store, cli: Callable[..., tuple[int, str, str]], step: int) -> None:
    """What it recorded comes out; of the rest it is said that it was not recorded. Exit code 0, where all
    else can be compared."""
    code, out, err = cli("replay", "step", step, "--store", before.path, "--json")
    values = orjson.loads(out)
    assert (values["equal"], values["differs_in"]) == (True, None), err
    assert code == (3 if values["not_compared"]["not proven"] else 0)
    assert values["not_compared"]["not recorded"] == UNKNOWN
    stages = values["stages"]
    assert [s for s, entry in stages.items() if entry["verdict"] == "not recorded"] == UNKNOWN
    assert {*fabric.EVERY_STEPS_STAGES, "selection", "metrics"} <= stages.keys()
    here = {line.partition(":")[0] for line in values["environment"]}
    if not here & {"cpu_capability", "processor", "packages.torch", "torch_build", "variables"}:
        assert {entry["verdict"] for s, entry in stages.items() if s not in UNKNOWN} == {"equal"}
        assert values["bit_for_bit"] is True
        printed = " ".join(cli("replay", "step", step, "--store", before.path)[1].split())
        assert "bit for bit, but for schedule, evidence, which was not recorded" in printed


def test_the_training_that_it_left_goes_on(before: Store) -> None:
    """Of the same configuration; its further steps have all stages of today. On a machine that computes
    otherwise it goes on from its checkpoint, without the step since."""
    model = before.path / "checkpoints/demo/actor/v00000002"
    settings, abandoned = fabric.config(fabric.GRPO, model=str(model)), None
    recorded = history_of(before, None, "actor").steps[2].planned.environment["cpu_capability"]
    if recorded != torch.backends.cpu.get_cpu_capability():
        abandoned = 2
        with pytest.raises(TrainError, match=f"cpu_capability: recorded '{recorded}'"):
            fabric.train(before, settings)
    fabric.train(before, settings, abandon_after=abandoned)
    history = history_of(before, None, "actor")
    last = sorted(history.steps)[-2:]
    assert last == ([3, 4] if abandoned is None else [4, 5])
    assert len({history.steps[step].planned.phase for step in last}) == 1
    for number, step in history.steps.items():
        assert is_tree(step.committed.digests["optimizer"]) == (number > 2)
        assert not is_tree(step.committed.digests["weights"]), "versions of a run keep the kind of the first"
    assert chain(history, sorted(history.steps)) == [], "digests of two kinds are not compared"
    result = prove_stretch(before, history, *last)
    stages = [{str(stage.verdict) for stage in s.replay.stages.values()} for s in result.steps if s.replay]
    assert stages == [{"equal"}, {"equal"}]
    assert all(s.replay is not None and "schedule" in s.replay.stages for s in result.steps)
