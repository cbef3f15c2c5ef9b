"""bench replay: what it measures of stores made here, at a small scale, and that its figures are of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.bench import replay, replay_side, replay_steps
from rollbook.bench.processes import BenchError
from rollbook.bench.replay import BAD, FEW, LONG, Measured, Plan, Search, outcome
from rollbook.bench.replay_rollouts import TINY, Steps
from rollbook.bench.replay_steps import Kept, capture_shares, in_store, kept, step_time, take
from rollbook.bench.scale_commands import Use
from rollbook.bench.scale_store import Made
from rollbook.bench.train_sides import make_model
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import StepCommitted

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
        for spec in (Steps(FEW, 1, 16, 8, 4), Steps(LONG, 1, 2, 8, 6, vectors=("logprobs", "losses"))):
            take(log, spec, folder / "model", folder)

    return in_store(folder, "steps", make)


def test_the_fault_is_in_what_steps_did(bad: Store) -> None:
    """From its step on every replay differs, in the optimizer first, and none before; the search runs the
    steps that it must, and no more."""
    assert replay._first_bad(PLAN) == 3
    result = replay_side.bisect(str(bad.path), PLAN.bad_steps - 1)
    assert (result["first"], result["ran"]) == (3, 5)  # 4, which follows the checkpoint, and 0 to 3
    assert result["wall_s"] > 0
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
    with pytest.raises(BenchError, match=r"run 'none' has no step\.planned"):
        kept(steps, "none")


def test_the_shares_of_recording(bad: Store) -> None:
    """One of each step but the first: what is not its model's and optimizer's time."""
    shares = capture_shares(bad, BAD)
    assert len(shares) == PLAN.bad_steps - 1
    assert all(0 < share < 1 for share in shares)
    committed = [e.record for e in bad.events_of([StepCommitted.KIND]) if isinstance(e.record, StepCommitted)]
    parts = {name: value for name, value in committed[-1].metrics.items() if name.endswith("_s")}
    whole = sum(parts[name] for name in ("manifest_s", *replay_steps.PARTS) if name in parts)
    assert shares[-1] == parts["manifest_s"] / whole


def test_the_parts_of_the_stages(steps: Store) -> None:
    """Each is counted once, none is more than the whole, and the code is as it was afterwards."""
    before = {name: getattr(module, name) for name, module in replay_side.PARTS.items()}
    times = replay_side.stages(str(steps.path), LONG, 0)
    assert set(times) == {"whole", "selection", *replay_side.PARTS}
    parts = {name: seconds for name, seconds in times.items() if name != "whole"}
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) <= times["whole"]
    assert {name: getattr(module, name) for name, module in replay_side.PARTS.items()} == before


def test_a_step_without_vectors_has_no_figure(steps: Store) -> None:
    """Its losses need the model."""
    with pytest.raises(ReplayError, match="recorded no logprobs"):
        replay_side.stages(str(steps.path), FEW, 0)


def test_finding_a_step_reads_all_that_a_replay_does(bad: Store) -> None:
    """Each reading is counted."""
    times = replay_side.find(str(bad.path), 5)
    assert list(times) == [
        *("history", "start", "drops", "openings", "activations", "vectors", "late_rewards")
    ]
    assert all(seconds > 0 for seconds in times.values())


def test_figures() -> None:
    """Medians over rounds; what finding takes more in the full store; the step that keeps the most of what it
    may."""
    parts = {"recorded_vectors": 0.25, "recorded_batch": 0.5, "part_stages": 0.125, "selection": 2.0}
    stores = {
        name: Made(Path(name), turns, 0, 0, "", 0, 0.0) for name, turns in (("small", 1), ("full", 1000))
    }
    result = outcome(
        Measured(
            *([0.02, 0.04, 0.05], [0.25, 0.75, 0.5], [0.01, 0.02]),
            [Kept(100, 10, 10_000), Kept(1000, 10, 65_024 * 2)],
            *([parts, parts], Use(4.5, 9.0), 6144),
            {"small": [{"history": 0.5}] * 2, "full": [{"history": 1.0, "drops": 0.25}] * 2},
            *(stores, Search(53, 1000, 6.0, Use(9.0, 12.5), 0.125)),
        )
    )
    figures = {item.figure.removeprefix("replay."): item for item in result.figures}
    assert {name: (item.value, item.ratio) for name, item in figures.items()} == {
        "capture_share": (0.04, None),
        "capture_share_100m": (0.015, None),
        "step_bytes": (130_048, 2.0),
        "data_stages_s": (0.875, None),
        "find_s": (0.75, None),
        "first_bad_steps": (53, None),
    }
    against = {name: str(item.against) for name, item in figures.items()}
    assert against["capture_share"].startswith("1M parameters: 0.50")
    assert against["step_bytes"].endswith("1000 samples, 10 tensors; goal for the ratio <= 1")
    assert "6,144 tokens; selection 2.00 s, the whole command 4.50 s" in against["data_stages_s"]
    assert against["find_s"].startswith("1,000 turns: 1.25 s, with a small log 0.50 s")
    assert against["first_bad_steps"].startswith("1000 steps; 48 step-times of 0.12 s, the command 12.5 s")
    assert {item.what: item.middle for item in result.spreads}["finding: drops"] == 0.25


def test_the_scale_sets_turns_steps_and_tokens() -> None:
    """A tenth of each; there are always checkpoints to bisect."""
    plan = replay.sized(0.1)
    assert (plan.turns, plan.bad_steps, plan.every, plan.tokens) == (100_000, 100, 50, 100)
    assert replay._first_bad(plan) == 49
    assert replay._first_bad(Plan()) == 499
    assert (replay.sized(1e-9).turns, replay.sized(1e-9).bad_steps) == (1_000, 100)


def test_a_store_that_is_whole_is_kept(tmp_path: Path) -> None:
    """One whose making was cut short is made anew."""
    logs: list[Store] = []

    def broken(log: Store) -> None:
        logs.append(log)
        if len(logs) == 1:
            raise BenchError("cut short")

    with pytest.raises(BenchError):
        in_store(tmp_path, "some", broken)
    for _ in range(2):
        in_store(tmp_path, "some", broken)
    assert len(logs) == 2
