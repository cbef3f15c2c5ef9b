"""Lines of a digest by blocks, of tensors that stay where they are: 16 bytes of each block are copied, and
what is left behind a tensor's last whole block. Nothing waits for the device until all are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from rollbook.engines.weights.block_hash import block_sums, merged
from rollbook.engines.weights.xxh3 import LANES
from rollbook.store.digest import BLOCK_BYTES, line_with, tree_root

PART_BYTES = 256 << 20
"""Of a tensor of a narrower type so much is widened at once."""
_WORDS = BLOCK_BYTES // 8
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceHashes:
    """What a tensor's hash is made of, on its device.

    Attributes:
        sums: of its whole blocks, int64 [blocks, 8].
        rest: the bytes behind them, uint8.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sums: torch.Tensor
    rest: torch.Tensor


def hash_there(name: str, tensor: torch.Tensor) -> DeviceHashes:
    """Begin to hash a tensor on its device. It may change once what its device is given later runs."""
    flat = tensor.detach().contiguous().reshape(-1)
    narrow = flat.dtype in _NARROW
    width = 4 if narrow else flat.element_size()
    whole = flat.numel() * width // BLOCK_BYTES * (BLOCK_BYTES // width)
    parts = [block_sums(part.view(torch.int64).view(-1, _WORDS)) for part in _parts(flat[:whole], narrow)]
    sums = torch.cat(parts) if parts else torch.empty((0, LANES), dtype=torch.int64, device=flat.device)
    rest = flat[whole:].float() if narrow else flat[whole:]
    dtype = "float32" if narrow else str(flat.dtype).removeprefix("torch.")
    # A copy: its view would keep the tensor's memory.
    return DeviceHashes(name, dtype, tuple(tensor.shape), sums, rest.view(torch.uint8).clone())


def _parts(flat: torch.Tensor, narrow: bool) -> Iterator[torch.Tensor]:
    """The numbers in float32, or as they are, whole blocks at a time."""
    if not flat.numel():
        return
    if not narrow:
        yield flat
        return
    for part in torch.split(flat, PART_BYTES // 4):
        yield part.float()


def lines_of(hashed: Sequence[DeviceHashes]) -> list[str]:
    """The lines of tensors of one device, which is waited for once."""
    if not hashed:
        return []
    hashes = merged(torch.cat([tensor.sums for tensor in hashed])).cpu().numpy().astype(">i8").tobytes()
    rests = torch.cat([tensor.rest for tensor in hashed]).cpu().numpy()
    lines, at, rest_at = [], 0, 0
    for tensor in hashed:
        size, left = 16 * len(tensor.sums), len(tensor.rest)
        own = hashes[at : at + size] + _hash(rests[rest_at : rest_at + left])
        lines.append(line_with(tensor.name, tensor.dtype, tensor.shape, tree_root(own)))
        at, rest_at = at + size, rest_at + left
    return lines


def _hash(rest: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    return xxhash.xxh3_128_digest(rest.data) if len(rest) else b""
