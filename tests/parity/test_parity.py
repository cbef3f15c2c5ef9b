"""Every row of the table, which `conftest.py` gives, over random masks, lengths, groups and ratios: in
float32, and in float64 where the peer keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity.row import SINGLE, Difference, Distance, Row, distance
from parity.rows.differences import DIFFERENCES

SEEDS = range(30)
LEAST_DIFFERENCE = 100 * SINGLE
"""That the greatest of a known difference is above."""


def _greatest(row: Row, dtype: torch.dtype) -> Distance:
    gaps = [distance(row.own, row.theirs, seed, row.draw, dtype) for seed in SEEDS]
    assert all(gap.greatest >= 0 for gap in gaps), "a number is not finite"
    return Distance(max(gap.value for gap in gaps), max(gap.gradient for gap in gaps))


def test_equal_in_value_and_gradient(
    row: Row, number: int, record_property: Callable[[str, object], None]
) -> None:
    """Up to the rounding of float32, and of float64."""
    single = _greatest(row, torch.float32)
    assert single.greatest <= SINGLE, f"{row.part} differs from {row.peer} {row.called} by {single}"
    line = f"{row.part}, {row.peer} {row.called}: float32 {single.value:.1e} {single.gradient:.1e}"
    if row.double is not None:
        double = _greatest(row, torch.float64)
        assert double.greatest <= row.double, f"{row.part} differs from {row.peer} {row.called} by {double}"
        line += f", float64 {double.value:.1e} {double.gradient:.1e}"
    record_property("measured", (number, line))


@pytest.mark.parametrize("of", DIFFERENCES, ids=lambda of: f"{of.one}-{of.other}".replace(" ", "-"))
def test_known_differences(of: Difference) -> None:
    """A peer that changed its mind would be seen."""
    gaps = [distance(of.of_one, of.of_other, seed, of.draw) for seed in SEEDS]
    assert max(gap.greatest for gap in gaps) > LEAST_DIFFERENCE
