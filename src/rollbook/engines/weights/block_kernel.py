"""The sums of `block_hash` in one pass over a GPU's memory, by Triton."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from rollbook.engines.weights.xxh3 import (
    LANES,
    LAST_KEYS,
    ROW_KEYS,
    ROWS,
    SCRAMBLE_FACTOR,
    SCRAMBLE_KEYS,
    START,
    STRIPES,
)

BESIDE = 4
"""Blocks that one program sums up side by side, so that more of memory's answers are awaited at once."""


def block_sums(words: torch.Tensor) -> torch.Tensor:
    """The eight sums of each block, int64 [blocks, 8]; arguments as of `block_hash.block_sums`."""
    words = words.contiguous()
    sums = torch.empty((len(words), LANES), dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(len(words), BESIDE),)
    shape = (BESIDE, ROWS, STRIPES, SCRAMBLE_FACTOR)
    _sum_blocks[grid](words, sums, _keys(words.device), len(words), *shape, num_warps=1)
    return sums


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Keys of a row's stripes, of the last stripe and of the scrambling, and the first sums: [19, 8]."""
    return torch.tensor([*ROW_KEYS, LAST_KEYS, SCRAMBLE_KEYS, START], device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks(  # type: ignore[no-untyped-def]
    words,
    sums,
    keys,
    count,
    BESIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STRIPES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BESIDE + tl.arange(0, BESIDE)[:, None, None]
    stripe = tl.arange(0, STRIPES)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    there = block < count
    place = words + block * (ROWS * STRIPES * 8) + stripe * 8
    row_keys = tl.load(keys + stripe * 8 + lane)
    last_keys = tl.load(keys + STRIPES * 8 + lane)
    scramble = tl.load(keys + (STRIPES + 1) * 8 + lane).to(tl.uint64, bitcast=True)
    grown = tl.load(keys + (STRIPES + 2) * 8 + lane + block * 0).to(tl.uint64, bitcast=True)
    for row in range(ROWS):
        last = (row == ROWS - 1) & (stripe == STRIPES - 1)
        key = tl.where(last, last_keys, row_keys).to(tl.uint64, bitcast=True)
        data = tl.load(place + row * (STRIPES * 8) + lane, mask=there, other=0).to(tl.uint64, bitcast=True)
        # The neighbour's word is in the same line of the cache: cheaper than an exchange between threads.
        other = tl.load(place + row * (STRIPES * 8) + (lane ^ 1), mask=there, other=0)
        keyed = data ^ key
        product = (keyed & 0xFFFFFFFF) * (keyed >> 32)
        grown += tl.sum(product + other.to(tl.uint64, bitcast=True), 1, keep_dims=True)
        scrambled = (grown ^ (grown >> 47) ^ scramble) * FACTOR
        grown = tl.where(row == ROWS - 1, grown, scrambled)
    tl.store(sums + block * 8 + lane, grown.to(tl.int64, bitcast=True), mask=there)
