"""Blocks hashed where a tensor is have the hashes that the library gives their bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.digest import BLOCK_BYTES, tree_hash

torch = pytest.importorskip("torch")

from rollbook.engines.weights.block_hash import block_sums, merged  # noqa: E402
from rollbook.engines.weights.device_hashes import hash_there, lines_of  # noqa: E402
from rollbook.engines.weights.digests import line_of, lines_of_stream  # noqa: E402

pytestmark = pytest.mark.torch


def _blocks(seed: int, count: int) -> np.ndarray:
    blocks = np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    blocks[0], blocks[1] = 0, 255
    return blocks


def _hashes(blocks: np.ndarray) -> list[bytes]:
    words = torch.from_numpy(blocks.view(np.int64))
    data = merged(block_sums(words)).numpy().astype(">i8").tobytes()
    return [data[16 * at : 16 * (at + 1)] for at in range(len(blocks))]


def test_blocks_have_the_librarys_hashes() -> None:
    """Zeros, ones and what chance gives, in more parts than one."""
    blocks = _blocks(0, 700)
    assert _hashes(blocks) == [xxhash.xxh3_128_digest(block.tobytes()) for block in blocks]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, BLOCK_BYTES * 8 - 1), st.integers(0, 1 << 32))
def test_a_bit_changes_half_of_the_bits(place: int, seed: int) -> None:
    """Of a block's hash, whichever bit of the block it is, to within six deviations."""
    [block, _, _] = _blocks(seed, 3)[[2, 0, 1]]
    other = block.copy()
    other[place // 8] ^= 1 << place % 8
    before, after = (int.from_bytes(h, "big") for h in _hashes(np.stack([block, other])))
    assert abs((before ^ after).bit_count() - 64) < 6 * 5.7


DTYPES = ["float32", "bfloat16", "float16", "int64", "uint8", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_tensors_have_the_lines_of_their_bytes(dtype: str, beyond: int, blocks: int) -> None:
    """Of every type, with numbers behind the last whole block and without."""
    kind = getattr(torch, dtype)
    width = 4 if dtype in ("bfloat16", "float16") else torch.empty(0, dtype=kind).element_size()
    count = max(blocks * BLOCK_BYTES // width + beyond, 0)
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 100).to(kind)
    assert lines_of([hash_there("t", tensor)]) == [line_of("t", tensor, tree=True)]


def test_many_tensors_at_once() -> None:
    """Also of several shapes, and with gaps between their numbers."""
    rng = torch.Generator().manual_seed(2)
    whole = torch.randn(300, 400, generator=rng)
    tensors = {"a": whole, "b": whole[:, ::2], "c": whole.T, "d": torch.tensor(3.0), "e": whole.bfloat16()}
    hashed = lines_of([hash_there(name, tensor) for name, tensor in tensors.items()])
    assert hashed == [line_of(name, tensor, tree=True) for name, tensor in tensors.items()]
    assert sorted(hashed) == sorted(lines_of_stream(tensors.items(), tree=True))
    assert len({line.rsplit(" ", 1)[1] for line in hashed}) == len(tensors)


def test_what_is_hashed_may_change_afterwards() -> None:
    """The next step may write over a tensor before its line is asked for."""
    tensor = torch.arange(40_000.0)
    line = line_of("t", tensor, tree=True)
    hashed = hash_there("t", tensor)
    tensor.zero_()
    assert lines_of([hashed]) == [line]


def test_swapped_blocks_are_another_tensor() -> None:
    """And so are words moved by a place, or a block more of zeros."""
    words = np.arange(BLOCK_BYTES // 4 * 4, dtype=np.uint32).reshape(4, -1)
    others = [words[[1, 0, 2, 3]], np.roll(words.reshape(-1), 1), np.concatenate([words, 0 * words[:1]])]
    hashes = {tree_hash(np.ascontiguousarray(array)) for array in [words, *others]}
    assert len(hashes) == 4


INTERPRETED = """
import numpy as np, torch
from rollbook.engines.weights.block_hash import _sums
from rollbook.engines.weights.block_kernel import block_sums
words = torch.from_numpy(np.random.default_rng(0).integers(-2**63, 2**63, (6, 8192), np.int64))
words[0] = 0
assert torch.equal(block_sums(words), _sums(words))
assert not torch.equal(block_sums(words), _sums(words ^ 1))
"""


def test_the_kernel_gives_the_same_sums() -> None:
    """By Triton's interpreter, without the device."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, timeout=120, env=environment)
