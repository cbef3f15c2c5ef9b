"""Corrections, held against loops in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.algorithms.corrections import CORRECTIONS, Bounds

ROWS = st.lists(st.lists(st.floats(-3, 3), max_size=5), min_size=1, max_size=5)
BOUNDS = Bounds(0.5, 2.0)


def _weights(name: str, rows: list[list[float]], bounds: Bounds = BOUNDS) -> list[float]:
    flat = np.array([value for row in rows for value in row], np.float64)
    weights: list[float] = CORRECTIONS[name](flat, np.array([len(row) for row in rows]), bounds).tolist()
    return weights


def _expected(name: str, row: list[float], bounds: Bounds) -> list[float]:
    def within(ratio: float) -> bool:
        return bounds.low <= ratio <= bounds.high

    ratios, product = [math.exp(d) for d in row], math.exp(min(max(sum(row), -20), 20))
    mean = math.exp(sum(row) / max(len(row), 1))
    match name:
        case "tis":
            return [min(max(ratio, bounds.low), bounds.high) for ratio in ratios]
        case "icepop":
            return [ratio if within(ratio) else 0.0 for ratio in ratios]
        case "sequence_tis":
            return [min(max(product, bounds.low), bounds.high)] * len(row)
        case "mis":
            return [product if within(product) else 0.0] * len(row)
        case _:
            return [ratio if within(mean) else 0.0 for ratio in ratios]


def test_by_hand() -> None:
    """Ratios 1/4, 1, 4 of one sample, whose product and mean are 1, and 3 of another."""
    rows = [[math.log(0.25), 0.0, math.log(4)], [math.log(3)]]
    expected = {
        "tis": [0.5, 1, 2, 2],
        "icepop": [0, 1, 0, 0],
        "sequence_tis": [1, 1, 1, 2],
        "mis": [1, 1, 1, 0],
        "sequence_mask_tis": [0.25, 1, 4, 0],
    }
    for name, weights in expected.items():
        assert _weights(name, rows) == pytest.approx(weights, rel=1e-12)


@given(ROWS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_loop_says_the_same(name: str, rows: list[list[float]]) -> None:
    """Over random ratios and lengths, samples without a token among them."""
    bounds = Bounds(0.5000001, 1.9999999)
    expected = [weight for row in rows for weight in _expected(name, row, bounds)]
    assert _weights(name, rows, bounds) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_where_engine_and_trainer_agree_all_weights_are_one(name: str) -> None:
    """Nothing is corrected."""
    assert _weights(name, [[0.0] * 4, [0.0]]) == [1.0] * 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_extreme_ratios_are_finite(name: str) -> None:
    """Log-ratios of a thousand overflow nothing."""
    assert np.isfinite(_weights(name, [[1000.0, -1000.0, 1000.0], [-1000.0]])).all()
