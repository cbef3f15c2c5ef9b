"""bench train: its sides train the same model on the same samples, and its figures are of their seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.bench import train, train_sides
from rollbook.bench.processes import BenchError
from rollbook.bench.train import Measured
from rollbook.bench.train_sides import BARE, OURS, PADDED, PLAIN, PLAIN_PACKED, SIDES, make_model, samples

pytestmark = pytest.mark.torch


def test_the_sides_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of AdamW on long-tailed samples: the trainer's losses, packed or padded, are those of a
    plain loop over transformers."""
    for name, value in {
        "SAMPLES": 6,
        "LONGEST": 160,
        "VOCAB": 256,
        "WIDTH": 64,
        "MOST": 200,
        "LR": 1e-3,
    }.items():
        monkeypatch.setattr(train_sides, name, value)
    make_model(tmp_path)
    assert len({len(sample) for sample in samples()}) > 2
    losses = {}
    for name, side in SIDES.items():
        step = side(tmp_path)
        losses[name] = [step() for _ in range(3)]
    first = losses[PLAIN]
    assert first[0] == pytest.approx(5.5, abs=0.2)  # the logarithm of 256
    assert first[2] < first[0] - 0.02
    for name, found in losses.items():
        assert found == pytest.approx(first, rel=2e-4), name


def test_figures() -> None:
    """Ratios are medians over rounds, against the faster and the smaller plain loop."""
    seconds = {
        OURS: [1.0, 2.0],
        PADDED: [3.0, 6.0],
        BARE: [0.9, 1.8],
        PLAIN: [2.0, 4.0],
        PLAIN_PACKED: [4.0, 4.0],
    }
    peaks = {OURS: 2 << 20, PADDED: 9 << 20, BARE: 2 << 20, PLAIN: 8 << 20, PLAIN_PACKED: 4 << 20}
    found = {figure.figure: figure for figure in train.outcome(Measured(seconds, peaks, 300)).figures}
    assert {name: figure.ratio for name, figure in found.items()} == {
        "train.packed_vs_padded": 3.0,
        "train.vs_transformers": 2.0,
        "train.peak_vs_transformers": 0.5,
        "train.replayability_share": None,
    }
    assert found["train.vs_transformers"].value == 200.0
    assert found["train.vs_transformers"].against == "transformers: 100 tokens/s"
    assert found["train.peak_vs_transformers"].against == "transformers_packed: 4 MiB"
    assert found["train.replayability_share"].value == pytest.approx(0.1)


def test_another_loss_is_no_figure() -> None:
    """A side that does other work is not measured."""
    with pytest.raises(BenchError, match=r"rollbook: its first loss is 9\.5, that of transformers 9\.0"):
        train._check({OURS: 9.5, PLAIN: 9.0})
