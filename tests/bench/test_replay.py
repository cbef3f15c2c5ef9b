"""bench replay: what it measures of stores made here, at a small scale, and that its figures are of that."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.bench import replay, replay_fault, replay_side, replay_steps
from rollbook.bench.processes import BenchError
from rollbook.bench.replay import BAD, FEW, LONG, MANY, Measured, Plan, Search, outcome
from rollbook.bench.replay_rollouts import TINY, Steps
from rollbook.bench.replay_steps import Kept, capture_shares, in_store, kept, step_time, take
from rollbook.bench.scale_commands import Use
from rollbook.bench.scale_store import Made
from rollbook.bench.train_sides import make_model
from rollbook.store import Store
from rollbook.store.events import StepCommitted, StepVectors

pytestmark = pytest.mark.torch
PLAN = Plan(bad_steps=8, every=4, tokens=6)
"""The fault is in step 3, the last before a checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stores are."""
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def bad(folder: Path) -> Store:
    """The training that goes wrong. Never write to it."""
    return in_store(folder, "bad", lambda log: replay._take_bad(log, PLAN, folder))


@pytest.fixture(scope="module")
def steps(folder: Path) -> Store:
    """A step of each other kind: of 128 samples, and one with vectors. Never write to it."""

    def make(log: Store) -> None:
        make_model(folder / "model", TINY)
        for made in (Steps(FEW, 1, 16, 8, 4), Steps(LONG, 1, 2, 8, 6, vectors=("logprobs", "losses"))):
            take(log, made, folder / "model", folder)

    return in_store(folder, "steps", make)


def test_the_fault_is_in_what_steps_did(bad: Store) -> None:
    """From its step on every replay differs, in the optimizer first, and none before; the search runs the
    steps that it must, and no more."""
    assert replay._first_bad(PLAN) == 3
    found = replay_side.bisect(str(bad.path), PLAN.bad_steps - 1)
    assert (found["first"], found["ran"]) == (3, 5)  # 4, which follows the checkpoint, and 0 to 3
    assert 0 < found["wall_s"]
    assert step_time(bad, BAD) > 0
    assert replay_side.bisect(str(bad.path), 2)["first"] is None


def test_another_first_bad_step_is_no_figure(bad: Store, tmp_path: Path) -> None:
    """A search that finds another step than the faulty one is not measured."""

    class _Side:
        def ask(self, **asked: Any) -> Any:
            return {"ran": 1, "first": 2, "wall_s": 0.1}

    with pytest.raises(BenchError, match="the first bad step is 3, and 2 was found"):
        replay._search(_Side(), bad, PLAN, tmp_path)  # type: ignore[arg-type]


def test_what_a_step_keeps(steps: Store) -> None:
    """Bytes of its two events but for the names of samples; a sample less is as much less."""
    few, long = kept(steps, FEW), kept(steps, LONG)
    assert (few.samples, long.samples, few.tensors, long.tensors) == (128, 16, 24, 24)
    a_sample = (few.stored - long.stored) / (128 - 16)
    assert 20 < a_sample < 48  # 3 bytes of each of 6 stages, and its place among the micro-batches
    assert few.ratio == few.stored / (16384 + 48 * 128 + 64 * 24)
    with pytest.raises(BenchError, match="run 'none' has no step.planned"):
        kept(steps, "none")


def test_the_shares_of_recording(bad: Store) -> None:
    """One of each step but the first: what is not its model's and optimizer's time."""
    shares = capture_shares(bad, BAD)
    assert len(shares) == PLAN.bad_steps - 1
    assert all(0 < share < 1 for share in shares)
    of = [e.record for e in bad.events_of([StepCommitted.KIND]) if isinstance(e.record, StepCommitted)]
    parts = {name: value for name, value in of[-1].metrics.items() if name.endswith("_s")}
    whole = sum(parts[name] for name in ("manifest_s", *replay_steps.PARTS) if name in parts)
    assert shares[-1] == parts["manifest_s"] / whole


def test_the_parts_of_the_stages(steps: Store) -> None:
    """Each is counted once, none is more than the whole, and the code is as it was afterwards."""
    before = {name: getattr(replay_side.steps, name) for name in replay_side.PARTS}
    found = replay_side.stages(str(steps.path), LONG, 0)
    assert set(found) == {"whole", "selection", *replay_side.PARTS}
    parts = {name: seconds for name, seconds in found.items() if name != "whole"}
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) <= found["whole"]
    assert {name: getattr(replay_side.steps, name) for name in replay_side.PARTS} == before


def test_a_step_that_does_not_replay_is_no_figure(steps: Store, tmp_path: Path) -> None:
    """Its vectors are another step's: the losses differ."""
    with pytest.raises(BenchError, match="step 0 of run few does not replay|recorded no logprobs"):
        replay_side.stages(str(steps.path), FEW, 0)
