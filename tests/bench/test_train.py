"""bench train: its sides train the same model on the same samples, and its figures are of their seconds."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollbook.bench import train, train_checkpoints, train_modes, train_sides
from rollbook.bench.checkpoint_sides import WAYS
from rollbook.bench.processes import BenchError, Process, some_cores
from rollbook.bench.train import Measured
from rollbook.bench.train_checkpoints import BOTH, OVERLAPPED, SHARDED, WHOLE, CheckpointLaps
from rollbook.bench.train_modes import ASYNC, COLOCATE, HYBRID, OVERLAP, Laps
from rollbook.bench.train_sides import (
    BARE,
    LARGE,
    ONE_RANK,
    OURS,
    PADDED,
    PLAIN,
    PLAIN_PACKED,
    RECOMPUTED,
    SIDES,
    TWO_RANKS,
    Size,
    make_model,
    samples,
)

pytestmark = pytest.mark.torch


def test_the_sides_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of AdamW on long-tailed samples: the trainer's losses, packed or padded, are those of a
    plain loop over transformers."""
    for name, value in {
        "SAMPLES": 6,
        "LONGEST": 160,
        "VOCAB": 256,
        "MOST": 200,
        "LR": 1e-3,
    }.items():
        monkeypatch.setattr(train_sides, name, value)
    make_model(tmp_path, Size(64, 4, 4))
    assert len({len(sample) for sample in samples()}) > 2
    losses = {}
    for name, (make, way) in SIDES.items():
        if name == TWO_RANKS:
            continue  # not in this process
        step = make(tmp_path, replace(way, samples=None))
        losses[name] = [step() for _ in range(3)]
    first = losses[PLAIN]
    assert first[0] == pytest.approx(5.5, abs=0.2)  # the logarithm of 256
    assert first[2] < first[0] - 0.02
    for name, curve in losses.items():
        assert curve == pytest.approx(first, rel=2e-4), name


def test_two_ranks_learn_the_same_as_one(tmp_path: Path) -> None:
    """As processes, which say how long their steps took and what of it was for the log."""
    make_model(tmp_path / "model")
    losses = {}
    for name in (ONE_RANK, TWO_RANKS):
        with Process(name, train._words(name, tmp_path / "model"), tmp_path, some_cores(2)) as side:
            answers = [side.ask(), side.ask()]
        losses[name] = [answer["loss"] for answer in answers]
        assert all(0 < answer["manifest"] < answer["seconds"] / 2 for answer in answers)
    assert losses[ONE_RANK][1] < losses[ONE_RANK][0]
    assert losses[TWO_RANKS] == pytest.approx(losses[ONE_RANK], rel=1e-5)


def test_figures() -> None:
    """Ratios are medians over rounds, against the faster and the smaller plain loop."""
    seconds = {
        OURS: [1.0, 2.0],
        PADDED: [3.0, 6.0],
        BARE: [0.9, 1.8],
        PLAIN: [2.0, 4.0],
        PLAIN_PACKED: [4.0, 4.0],
        RECOMPUTED: [1.25, 2.5],
        ONE_RANK: [3.0, 3.0],
        TWO_RANKS: [1.5, 2.0],
        LARGE: [10.0, 20.0],
    }
    peaks = {OURS: 2 << 20, PADDED: 9 << 20, BARE: 2 << 20, PLAIN: 8 << 20, PLAIN_PACKED: 4 << 20}
    peaks |= {RECOMPUTED: 1 << 20, ONE_RANK: 2 << 20, TWO_RANKS: 2 << 20, LARGE: 90 << 20}
    modes = {COLOCATE: [1.0, 2.0], HYBRID: [1.5, 3.5], ASYNC: [1.5, 1.75], OVERLAP: [3.0, 3.5]}
    held = {WHOLE: [2.0, 4.0], OVERLAPPED: [1.0, 3.0], SHARDED: [1.0, 1.0], BOTH: [0.5, 0.5]}
    laps = CheckpointLaps(held, 4.0, 14.0, 1e-8)
    measured = Measured(seconds, [0.1, 0.4], peaks, 300, Laps(modes), laps)
    figures = {figure.figure: figure for figure in train.outcome(measured).figures}
    assert {name: figure.ratio for name, figure in figures.items()} == {
        "train.packed_vs_padded": 3.0,
        "train.vs_transformers": 2.0,
        "train.peak_vs_transformers": 0.5,
        "train.recompute_speed": 0.8,
        "train.recompute_peak": 0.5,
        "train.dp2_vs_1": 1.75,
        "train.replayability_share": None,
        "train.replayability_share_6m": None,
        "train.hybrid_vs_colocate": 1.625,
        "train.hybrid_vs_async": 1.5,
        "train.overlap_gain": 2.0,
        "train.checkpoint_held_overlap_s": 0.625,
        "train.checkpoint_held_s": 0.1875,
        "train.resume_s": None,
    }
    assert figures["train.checkpoint_held_s"].value == 0.5
    assert figures["train.checkpoint_held_s"].against == "whole: 3.00 s"
    assert figures["train.resume_s"].value == 4.0
    assert figures["train.hybrid_vs_colocate"].value == 2.5
    assert figures["train.hybrid_vs_colocate"].against == "colocate: 1.50 steps/s"
    assert figures["train.vs_transformers"].value == 200.0
    assert figures["train.vs_transformers"].against == "transformers: 100 tokens/s"
    assert figures["train.peak_vs_transformers"].against == "transformers_packed: 4 MiB"
    assert figures["train.replayability_share"].value == pytest.approx(0.015)
    assert figures["train.replayability_share_6m"].value == pytest.approx(0.1)


def test_every_side_takes_its_turns() -> None:
    """In one of the runs."""
    assert sorted(name for run in train.RUNS for name in run) == sorted(SIDES)


def test_the_loop_runs_in_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same agents, batches and steps; what each is called is what its CONFIG says."""
    short = {name: replace(setting, steps=3) for name, setting in train_modes.MODES.items()}
    monkeypatch.setattr(train_modes, "MODES", {name: short[name] for name in (COLOCATE, OVERLAP)})
    rounds: list[None] = []
    laps = train_modes.run_modes(tmp_path, 1, lambda: rounds.append(None))
    assert (laps.steps_per_s.keys(), len(rounds)) == ({COLOCATE, OVERLAP}, 1)
    assert all(rate > 0 for rates in laps.steps_per_s.values() for rate in rates)
    configs = [tomllib.loads(file.read_text()) for file in sorted(tmp_path.glob("modes-*/loop.toml"))]
    assert sorted((config["mode"], config["sync"]["overlap"]) for config in configs) == [
        ("async", True),
        ("colocate", False),
    ]


def test_checkpoints_are_written_in_each_way(tmp_path: Path) -> None:
    """In turns, by two ranks; one rank goes on from the last to the same loss, gradient and weights."""
    make_model(tmp_path / "model", Size(64, 2, 4))
    rounds: list[None] = []
    laps = train_checkpoints.run_checkpoints(tmp_path, tmp_path / "model", 1, lambda: rounds.append(None))
    assert {way: len(seconds) for way, seconds in laps.held.items()} == dict.fromkeys(WAYS, 1)
    assert len(rounds) == 1
    assert all(seconds > 0 for (seconds,) in laps.held.values())
    assert min(laps.resume_s, laps.begin_s) > 0
    assert laps.apart < 1e-7
    left = [path.name for path in tmp_path.glob("checkpoints-two/store/checkpoints/bench/actor/*")]
    assert left == ["v00000001"]


def test_another_course_is_no_figure(tmp_path: Path) -> None:
    """Layouts whose next steps made other weights are not measured."""
    for name, value in (("one", 1.0), ("two", 1.5)):
        save_file({"w": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(BenchError, match=r"a weight on one rank differs from that on two by 0\.5"):
        train_checkpoints._apart(tmp_path)


def test_another_loss_is_no_figure() -> None:
    """A side that does other work is not measured."""
    with pytest.raises(BenchError, match=r"rollbook: its first loss is 9\.5, that of transformers 9\.0"):
        train._check({OURS: 9.5, PLAIN: 9.0})
