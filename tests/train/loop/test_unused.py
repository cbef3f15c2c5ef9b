"""A training that is short, or takes no step, says why; one that cannot begin writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import trainer_records

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import RunOpened, SampleDropped, StepCommitted

Stores = Callable[..., Store]


def _refused(log: Store, settings: Any) -> list[str]:
    """The lines of the error of a training that takes no step."""
    with pytest.raises(TrainError) as refused:
        fabric.train(log, settings)
    return str(refused.value).splitlines()


@pytest.mark.parametrize("values", ["SFT", "GRPO"])
def test_a_mistyped_run(recorded: Stores, values: str) -> None:
    """The runs that there are are named, and the mistyped one does not come to be."""
    log = recorded()
    before = log.head()
    lines = _refused(log, fabric.config(getattr(fabric, values), run="dem0"))
    assert lines[0].startswith("run 'dem0': 0 of ")
    assert lines[0].endswith("the log at serve=402 fills no further one: of 43 trajectories")
    assert lines[1:] == ["  43 are of run 'demo'"]
    assert log.head() == before
    assert not (log.path / "checkpoints").exists()


def test_no_step_where_steps_were_asked_for_is_a_failure(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Steps were asked for, and none was taken: that is no success."""
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, run="dem0")))
    code, _, err = cli("train", tmp_path / "train.toml", "--store", recorded().path)
    assert code == 2
    assert "  43 are of run 'demo'" in err


def test_groups_that_were_used(trained: Stores) -> None:
    """The same groups again, under another configuration: each was used by the one before."""
    log = trained()
    lines = _refused(log, fabric.config(fabric.GRPO, seed=8))
    assert lines[1:] == [
        "  24 were used already, by committed steps of this run",
        "  18 are of split 'teacher' (recipe.splits: train; to train on them: recipe.splits = [\"teacher\"])",
        "  1 are of split 'eval' (recipe.splits: train)",
    ]
    assert len(trainer_records(log, StepCommitted)) == 12


def test_every_reason_has_its_line(tmp_path: Path) -> None:
    """Each trajectory is counted once."""
    log, T, records = rb.open(tmp_path / "store", create=True), fabric.T, []
    for i in range(3):
        records += fabric.records(f"short{i}", group="short", reward=float(i))
    for i in range(4):
        records += fabric.records(f"flat{i}", group="flat", reward=1.0)
        records += fabric.records(f"left{i}", group="left", reward=float(i))
        records += fabric.records(f"bare{i}", group="bare")
    records += fabric.records("open", group="short", finished=False)
    records += fabric.records("text", [T(delivered=False)], group="text", reward=1.0)
    records += fabric.records("judged", split="eval", reward=1.0)
    records += fabric.records("unknown", [T(version=None)], reward=1.0)
    fabric.append(log, records)
    fabric.append(log, fabric.records("elsewhere"), run="other")
    algorithm = {"name": "grpo", "groups": 3, "group_size": 4}
    lines = _refused(log, fabric.config(fabric.GRPO, algorithm=algorithm))
    assert lines[0].endswith("of 20 trajectories")
    assert sorted(line.strip() for line in lines[1:]) == [
        "1 are dropped by the rule no_version",
        "1 are not finished",
        "1 are of run 'other'",
        "1 are of split 'eval' (recipe.splits: train)",
        "1 hold no token that can be trained: text only, not delivered, or failed",
        "3 are in groups of fewer than 4 (algorithm.group_size)",
        "4 are dropped by the rule no_reward",
        "4 are in groups whose rewards are all equal (recipe.drop_zero_variance)",
        "4 are left: a step takes 3 groups (algorithm.groups)",
    ]


def test_a_training_that_ends_early(recorded: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps were taken, so it is well; what is left is told."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, steps=9))
    err = capsys.readouterr().err
    assert "run 'demo': 3 of 9 steps; the log at serve=402 fills no further one: of 43 trajectories" in err
    assert "  24 were used already, by committed steps of this run" in err


def test_an_epoch_without_samples(recorded: Stores) -> None:
    """Of a run that is there already: what the recipe drops is recorded, and no step is taken."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=1))
    stale = {"splits": ["train"], "max_staleness": 0}
    lines = _refused(log, fabric.config(fabric.SFT, recipe=stale))
    assert "  24 are dropped by the rule staleness" in lines
    assert len({drop.turn_id for drop in trainer_records(log, SampleDropped)}) >= 24
    assert len(trainer_records(log, StepCommitted)) == 1
    assert len(trainer_records(log, RunOpened)) == 2


def test_an_empty_log(tmp_path: Path) -> None:
    """It holds nothing."""
    log = rb.open(tmp_path / "store", create=True)
    assert _refused(log, fabric.config(fabric.SFT))[0].endswith(
        "fills no further one: there is no trajectory"
    )
