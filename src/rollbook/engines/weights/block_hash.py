"""xxh3-128 of blocks of 64 KiB, computed where a tensor is: the bits that the library `xxhash` gives.

For a digest by blocks (`store.digest`) tensors need not leave their device: of each block there are 16 bytes
to copy. The formulas are those of XXH3's specification for inputs beyond 240 bytes
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), in integers of 64 bits that wrap; torch has
signed ones alone, whose sums, products and exclusive ors have the same bits.

A block is 64 rows of 16 stripes of 64 bytes, the last of which is set apart. Within a row eight sums grow in
any order, so a device computes them side by side; between rows they are scrambled. `block_kernel` does so in
one pass where Triton is installed; here it is written in torch, for every other device, in passes over parts.
"""

from __future__ import annotations

from typing import Any

import torch

from rollbook.engines.weights.xxh3 import (
    FACTORS,
    LANES,
    LAST_KEYS,
    ROW_KEYS,
    ROWS,
    SCRAMBLE_FACTOR,
    SCRAMBLE_KEYS,
    START,
    STRIPES,
    secret_words,
    signed,
)
from rollbook.store.digest import BLOCK_BYTES

_LOW = 0xFFFFFFFF
PART_BLOCKS = 512
"""Blocks that torch passes over at once: 32 MiB, and a few times that for what is between."""


def block_sums(words: torch.Tensor) -> torch.Tensor:
    """The eight sums of each block, int64 [blocks, 8], of which `merged` makes its hash.

    Args:
        words: the blocks' bytes as int64 [blocks, 8192], on any device.
    """
    if words.is_cuda and (kernel := _kernel()) is not None:
        sums: torch.Tensor = kernel.block_sums(words)
        return sums
    parts = [_sums(part) for part in torch.split(words, PART_BLOCKS)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _kernel() -> Any:
    try:
        from rollbook.engines.weights import block_kernel
    except ImportError:  # torch for other devices comes without Triton
        return None
    return block_kernel


def _sums(words: torch.Tensor) -> torch.Tensor:
    """The eight sums of each block, int64 [blocks, 8]."""
    rows = words.view(-1, ROWS, STRIPES, LANES)
    keys = torch.tensor(ROW_KEYS, device=words.device)
    scramble = torch.tensor(SCRAMBLE_KEYS, device=words.device)
    sums = torch.tensor(START, device=words.device).expand(len(rows), LANES)
    for number in range(ROWS):
        row = rows[:, number]
        if number < ROWS - 1:
            sums = sums + _grown(row, keys).sum(1)
            sums = (_shifted(sums, 47) ^ sums ^ scramble) * SCRAMBLE_FACTOR
        else:  # its last stripe has keys of its own, and nothing is scrambled behind it
            sums = sums + _grown(row[:, :-1], keys[:-1]).sum(1)
            sums = sums + _grown(row[:, -1], torch.tensor(LAST_KEYS, device=words.device))
    return sums


def _grown(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What stripes [..., 8] add to the sums."""
    keyed = data ^ keys
    swapped = data.reshape(*data.shape[:-1], LANES // 2, 2).flip(-1).reshape(data.shape)
    return (keyed & _LOW) * _shifted(keyed, 32) + swapped


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right, with zeros coming in."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def merged(sums: torch.Tensor) -> torch.Tensor:
    """xxh3-128 of blocks, as (high, low) halves, int64 [blocks, 2], from their sums [blocks, 8].

    Some sixty small operations: they are done once for the blocks of many tensors.
    """
    low = _mixed(sums, secret_words(11, LANES), BLOCK_BYTES * FACTORS[0])
    high = _mixed(sums, secret_words(117, LANES), ~(BLOCK_BYTES * FACTORS[1]))
    return torch.stack([high, low], 1)


def _mixed(sums: torch.Tensor, keys: list[int], start: int) -> torch.Tensor:
    keyed = sums ^ torch.tensor(keys, device=sums.device)
    value = _folded(keyed[:, 0::2], keyed[:, 1::2]).sum(1) + signed(start)
    value = value ^ _shifted(value, 37)
    value = value * 0x165667919E3779F9
    return value ^ _shifted(value, 32)


def _folded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The exclusive or of the halves of the products of 128 bits."""
    left_low, left_high = left & _LOW, _shifted(left, 32)
    right_low, right_high = right & _LOW, _shifted(right, 32)
    low, middle = left_low * right_low, left_high * right_low
    cross = _shifted(low, 32) + (middle & _LOW) + left_low * right_high
    upper = _shifted(middle, 32) + _shifted(cross, 32) + left_high * right_high
    return upper ^ ((cross << 32) | (low & _LOW))
