"""Checksums equal SGLang's own, into whatever pieces the bytes are cut."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.weights.digests import tensor_bytes
from rollbook.engines.weights.tensor_checksums import CHECKSUMS, Sha256Checksum, TiledChecksum, checksum_kind

TILE = 32768
TILED = {
    1: "1f3bb5b817d9ee21",
    2: "f2c8ff05f94e2450",
    3: "cb4c21162e7f706e",
    4: "1b917de90aa6b0a2",
    5: "0d8ac3a25db323cb",
    8: "49787c98c94ca819",
    4095: "187ecdfe264ae751",
    4096: "e2ee059ff74106c3",
    TILE - 4: "e3dbb73085d95cbe",
    TILE - 1: "1492279798bc2c21",
    TILE: "0fbefb6f20b083c9",
    TILE + 1: "2411bb6e46f2b179",
    TILE + 4: "ce9cc22d4ffb4a97",
    2 * TILE - 1: "b6df0451c97950ce",
    2 * TILE: "367f93cd14ea88d1",
    2 * TILE + 1: "6b6db58d4c19bbc0",
    100_001: "2799fd4d7f0cbd66",
    16 * TILE: "6bce6a132340ee40",
    16 * TILE + 1: "55f489e7790bdae9",
    700_001: "fa050d36f5649deb",
}
"""Size in bytes -> what SGLang 0.5.23's kernels answer for `_bytes` of it, run by Triton's interpreter."""


def _bytes(size: int) -> torch.Tensor:
    return torch.tensor([(i * i * 31 + i * 7 + size) % 256 for i in range(size)], dtype=torch.uint8)


def _in_pieces(checksum: Sha256Checksum | TiledChecksum, data: torch.Tensor, cuts: list[int]) -> str:
    ends = sorted(min(cut, data.numel()) for cut in cuts)
    for start, end in itertools.pairwise([0, *ends, data.numel()]):
        checksum.update(data[start:end])
    return checksum.hexdigest()


@pytest.mark.parametrize("size", TILED)
def test_tiled_as_the_kernel_computes_it(size: int) -> None:
    """Around the borders of words and tiles, in one piece and in several."""
    data = _bytes(size)
    for cuts in ([], [1], [size // 2], [TILE], [3, 5, size // 3], [4, TILE + 4]):
        assert _in_pieces(TiledChecksum(), data, cuts) == TILED[size], cuts


def test_a_tensor_without_elements_has_a_checksum() -> None:
    """A tensor without elements: SGLang answers 0, and SHA-256 has its own answer."""
    empty = torch.empty(0, 4)
    assert _in_pieces(TiledChecksum(), empty, []) == "0" * 16
    assert _in_pieces(Sha256Checksum(), empty, []) == hashlib.sha256().hexdigest()[:16]


@given(st.integers(0, 3 * TILE), st.lists(st.integers(0, 3 * TILE), max_size=5))
def test_any_split_is_the_same(size: int, cuts: list[int]) -> None:
    """The bytes count, not the pieces they come in."""
    data = torch.arange(size, dtype=torch.int64).mul_(2654435761).remainder_(251).to(torch.uint8)
    for make in (Sha256Checksum, TiledChecksum):
        assert _in_pieces(make(), data, cuts) == _in_pieces(make(), data, [])


@given(st.integers(1, 2 * TILE), st.data())
def test_one_bit_changes_it(size: int, data: st.DataObject) -> None:
    """Whichever byte it is in."""
    first = torch.zeros(size, dtype=torch.uint8)
    other = first.clone()
    other[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for make in (Sha256Checksum, TiledChecksum):
        assert _in_pieces(make(), first, []) != _in_pieces(make(), other, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_the_bytes_in_row_order(dtype: torch.dtype) -> None:
    """Of any type, also where the tensor is a view that does not lie in row order."""
    tensor = torch.arange(60).reshape(6, 10).to(dtype)
    raw = bytes(tensor_bytes(tensor.clone()))
    turned = tensor.T.contiguous().T
    assert not turned.is_contiguous()
    assert bytes(tensor_bytes(turned)) == raw
    for make in (Sha256Checksum, TiledChecksum):
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        assert _in_pieces(make(), turned, []) == _in_pieces(make(), flat, [])
    assert _in_pieces(Sha256Checksum(), tensor, []) == hashlib.sha256(raw).hexdigest()[:16]


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_unaligned_bytes_have_the_same_checksum(start: int) -> None:
    """Bytes that do not begin at a word's border."""
    data = _bytes(100_001)
    lent = torch.cat([torch.zeros(start, dtype=torch.uint8), data])[start:]
    assert _in_pieces(TiledChecksum(), lent, []) == TILED[100_001]


def test_a_digest_may_be_read_before_the_end() -> None:
    """A digest is of the bytes so far, and more may come."""
    for make in (Sha256Checksum, TiledChecksum):
        checksum, data = make(), _bytes(100_001)
        checksum.update(data[:777])
        assert checksum.hexdigest() == _in_pieces(make(), data[:777], [])
        checksum.update(data[777:])
        assert checksum.hexdigest() == _in_pieces(make(), data, [])


def test_the_kind_is_the_devices() -> None:
    """SHA-256 on a CPU, the tiled one elsewhere."""
    assert CHECKSUMS[checksum_kind("cpu")] is Sha256Checksum
    assert CHECKSUMS[checksum_kind("cuda")] is TiledChecksum
