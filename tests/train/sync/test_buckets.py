"""Buckets: every tensor once and in order, sizes kept, two buffers by turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.embedded.sent_tensors import read_sent
from rollbook.train.sync.shared_memory import payload
from rollbook.train.sync.transports import Buffers, buckets

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
SHAPES = st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 9), st.integers(1, 9)))


def _named(described: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(f"t{i}", torch.randint(0, 200, shape).to(dtype)) for i, (shape, dtype) in enumerate(described)]


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=20), st.integers(1, 400))
def test_buckets_hold_all_tensors_bit_for_bit(
    described: list[tuple[tuple[int, ...], torch.dtype]], size: int
) -> None:
    """All tensors, in their order and bit for bit; no bucket mixes types or is too large without need."""
    named = _named(described)
    received = []
    for bucket in buckets(iter(named), Buffers(size, CPU)):
        assert len(bucket.names) == 1 or bucket.flat.numel() <= size
        for name, tensor in bucket.tensors():
            assert tensor.dtype == bucket.dtype
            received.append((name, tensor.clone()))
        assert bucket.flat.numel() == sum(t.numel() * t.element_size() for _, t in bucket.tensors())
    assert [name for name, _ in received] == [name for name, _ in named]
    for (_, got), (_, sent) in zip(received, named, strict=True):
        assert got.shape == sent.shape
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_a_bucket_ends_where_the_next_tensor_does_not_fit() -> None:
    """A bucket ends only where the next tensor does not fit, or is of another type."""
    four = [(f"t{i}", torch.full((10,), float(i))) for i in range(4)]
    kinds = [*four, ("b", torch.zeros(1, dtype=torch.bfloat16))]
    names = [bucket.names for bucket in buckets(iter(kinds), Buffers(80, CPU))]
    assert names == [("t0", "t1"), ("t2", "t3"), ("b",)]
    (whole,) = buckets(iter(four), Buffers(160, CPU))
    assert whole.names == ("t0", "t1", "t2", "t3")


def test_a_bucket_stands_while_the_next_is_filled() -> None:
    """What one bucket holds stands while the next is filled, and is overwritten by the one after."""
    named = [(f"t{i}", torch.full((4,), float(i))) for i in range(4)]
    held = list(buckets(iter(named), Buffers(16, CPU)))
    assert [bucket.tensors()[0][1][0].item() for bucket in held] == [2, 3, 2, 3]
    assert len({bucket.flat.data_ptr() for bucket in held}) == 2


def test_buffers_for_other_processes_are_shared_memory() -> None:
    """Only buffers for other processes are in memory that those can map."""
    (private,) = buckets([("t", torch.zeros(4))], Buffers(16, CPU))
    (shared,) = buckets([("t", torch.zeros(4))], Buffers(16, CPU, shared=True))
    assert (private.flat.is_shared(), shared.flat.is_shared()) == (False, True)


def test_handles_move_nothing() -> None:
    """Memory is where it was once its handles are made: another thread may be reading it."""
    (bucket,) = buckets([("t", torch.arange(4.0))], Buffers(1 << 20, CPU, shared=True))
    before = bucket.flat.data_ptr()
    for _ in range(2):
        handles = payload(bucket.tensors())
        assert bucket.flat.data_ptr() == before
    ((name, tensor),) = read_sent([handles])
    assert name == "t"
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_is_described_as_sglang_expects(dtype: torch.dtype) -> None:
    """Names, types and shapes of the tensors in the buffer."""
    (bucket,) = buckets(
        [("a", torch.zeros(2, 3, dtype=dtype)), ("b", torch.zeros(1).to(dtype))], Buffers(99, CPU)
    )
    name = str(dtype).removeprefix("torch.")
    assert bucket.described() == {"names": ["a", "b"], "dtypes": [name, name], "shapes": [[2, 3], [1]]}
