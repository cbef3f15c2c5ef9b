"""`rollbook train --plan`: what each rank will need, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(fabric.toml(fabric.config(fabric.GRPO, micro_batch_size=None, tokens_per_micro_batch=64)))
    return path


def test_a_column_for_each_stage(config: Path, recorded: Callable[..., Store], cli: Run) -> None:
    """Of as many ranks as the layout needs, or as are named; the log is as it was."""
    log = recorded()
    before = log.head()
    command = ("train", config, "--store", log.path, "--plan", "--set", "parallel.pipeline=2")
    code, out, _ = cli(*command)
    lines = out.splitlines()
    assert code == 0
    assert "; 2 ranks (data 1, tensor 1, pipeline 2)" in lines[0]
    assert "forward passes of at most 64 tokens, all trained; longest sample: " in lines[1]
    assert lines[1].endswith("(in the log)")
    assert lines[2].split() == ["MiB", "of", "a", "rank", "stage", "1", "stage", "2"]
    parts = ["weights", "gradients", "optimizer", "reference", "activations", "logits"]
    assert [line.split()[0] for line in lines[3:11]] == [*parts, "total", "parameters"]
    assert all(len(line.split()) == 3 for line in lines[3:11])
    assert lines[11].startswith("all ranks together take ")
    code, out, _ = cli(*command, "--ranks", 4, "--json")
    plan = orjson.loads(out)
    assert (code, plan["ranks"], plan["copies"], len(plan["stages"])) == (0, 4, 2, 2)
    for stage in plan["stages"]:
        assert stage["total"] == sum(stage[part] for part in parts) > stage["state"] > 0
    assert log.head() == before


def test_what_cannot_be(config: Path, recorded: Callable[..., Store], cli: Run) -> None:
    """Ranks that do not divide, and a model that cannot be split: the same errors as the training's."""
    log = recorded()
    command = ("train", config, "--store", log.path, "--plan")
    code, _, err = cli(*command, "--set", "parallel.tensor=2", "--ranks", 3)
    assert (code, "3 ranks cannot be shared by tensor = 2" in err) == (2, True)
    code, _, err = cli(*command, "--set", "parallel.tensor=3")
    assert (code, "cannot be split over 3 tensor-parallel ranks" in err) == (2, True)


def test_json_is_of_the_plan(config: Path, recorded: Callable[..., Store], cli: Run) -> None:
    """A training prints none, and does not begin."""
    log = recorded()
    before = log.head()
    code, _, err = cli("train", config, "--store", log.path, "--json")
    assert (code, "goes with --plan" in err) == (2, True)
    assert log.head() == before
