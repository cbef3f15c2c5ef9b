"""Normalizers: values by hand, and the same loss and gradient for any micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.algorithms.normalizers import NORMALIZERS, Totals

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 16 / 4),
        ("sequence_mean", (2 + 10) / 2),
        ("sequence_sum", 16 / 2),
        ("constant", 16 / (2 * 8)),
    ],
)
def test_values_by_hand(name: str, expected: float) -> None:
    """Two samples, of 3 tokens and of 1; the constant length is 8."""
    normalizer = NORMALIZERS[name]
    loss = normalizer.add(LOSSES, MASK) / normalizer.divisor(Totals(4, 2), 8)
    assert float(loss) == pytest.approx(expected, rel=1e-15)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31), st.data())
@pytest.mark.parametrize("name", NORMALIZERS)
def test_micro_batches_and_order_do_not_matter(
    name: str, rows: int, columns: int, seed: int, data: Any
) -> None:
    """Samples in any order, in any slices, padded or not: one loss and one gradient."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64).requires_grad_()
    order = torch.randperm(rows, generator=generator)
    cuts = sorted(data.draw(st.sets(st.integers(1, rows))) | {rows})
    normalizer = NORMALIZERS[name]

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return sum(
            (normalizer.add(torch.where(mask[p], values[p], 0.0), mask[p]) for p in parts),
            start=torch.zeros((), dtype=torch.float64),
        )

    whole = total([torch.arange(rows)])
    parts = total([order[a:b] for a, b in zip([0, *cuts], cuts, strict=False)])
    assert float(parts) == pytest.approx(float(whole), rel=1e-12, abs=1e-12)
    gradients = [torch.autograd.grad(loss, [values])[0] for loss in (whole, parts)]
    assert torch.allclose(*gradients, rtol=1e-12)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_sample_without_trained_tokens_adds_nothing(name: str) -> None:
    """Nor does it make a NaN."""
    assert float(NORMALIZERS[name].add(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))) == 0.0
