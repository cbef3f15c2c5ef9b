"""What leaves a device in one transfer is what it was."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rollbook.train.step.host_copies import by_type, copied_at_once  # noqa: E402

pytestmark = pytest.mark.torch


def test_each_tensor_is_a_copy_of_its_own() -> None:
    """Of every type and shape, in order: also empty ones, single numbers, and such with gaps between."""
    rng = torch.Generator().manual_seed(0)
    floats = torch.randn(6, 8, generator=rng)
    tensors = [floats, floats[:, ::3], torch.tensor(3), torch.empty(0, 4), floats > 0, floats.T, floats[1, 2]]
    copies = by_type(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert [(c.dtype, c.shape) for c in copies] == [(t.dtype, t.shape) for t in tensors]
    floats.zero_()
    assert not torch.equal(copies[0], floats)


def test_what_is_there_stays() -> None:
    """Nothing is copied on a CPU."""
    tensors = [torch.ones(2), torch.zeros(3, dtype=torch.int64)]
    assert all(a is b for a, b in zip(tensors, copied_at_once(tensors), strict=True))
