"""SGLang's checksums of tensors, computed here over bytes that come piece by piece.

`/weights_checker` gives 64 bits for each tensor: on a CPU the first 8 bytes of SHA-256, on a GPU a hash that
its threads can compute side by side (0.5.23, `sglang.kernels.ops.memory.gpu_tensor_hash`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rollbook.engines.weights.digests import tensor_bytes

Words = npt.NDArray[np.uint32]

_MIX_1, _MIX_2 = 0x85EBCA6B, 0xC2B2AE35
_SEED = 0x243F6A88
_PLACES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 13))
"""Multiplier, seed and rotation of a word's place, for each of a tile's two sums."""
_TILE = 4 * 8192
"""Bytes of a tile."""
_CPU_BLOCK, _GPU_BLOCK = 4 * _TILE, 1024 * _TILE
"""Bytes worked on at a time: on a CPU so few that they stay in a core's cache and one thread does it, since
threads that wait for each other after each small operation take longer than one."""
_WHOLE = (1 << 64) - 1


class Checksum(Protocol):
    """A checksum that grows."""

    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a tensor, behind those before."""

    def hexdigest(self) -> str:
        """The checksum so far: 16 hexadecimal digits."""


class Sha256Checksum:
    """The first 8 bytes of SHA-256: the checksum of an engine on a CPU."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a tensor, behind those before."""
        self._hash.update(tensor_bytes(tensor).data)

    def hexdigest(self) -> str:
        """The checksum so far: 16 hexadecimal digits."""
        return self._hash.hexdigest()[:16]


class TiledChecksum:
    """The checksum of an engine on a GPU: two sums per tile of 8,192 words, of each word mixed with
    its place.

    A word w at place i adds mix(w ^ ((i * a + seed) ^ rotl(i, r))) modulo 2**32, for two triples
    (a, seed, r). The sums of a tile, XORed with the tensor's size in bytes and mixed again, are
    the halves of a number; the tiles' numbers are added modulo 2**64 and put through
    splitmix64's finalizer. All of it is computed where the tensors are.
    """

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        """Of the tiles so far, int64 [tiles, 2]."""
        self._rest: torch.Tensor | None = None
        """What does not fill a tile yet, uint8 [bytes]."""
        self._size = 0

    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a tensor, behind those before."""
        data = tensor.detach().contiguous().reshape(-1)
        if not data.numel():
            return
        data = data.view(torch.uint8)
        if self._rest is not None:
            missing = _TILE - self._rest.numel()
            first = torch.cat([self._rest, data[:missing]])
            data, self._rest = data[missing:], None
            if first.numel() < _TILE:
                self._rest = first
                return
            self._add(first)
        whole = data.numel() // _TILE * _TILE
        for block in data[:whole].split(_GPU_BLOCK if data.is_cuda else _CPU_BLOCK):
            if block.numel():
                self._add(block)
        if whole < data.numel():
            self._rest = data[whole:].clone()

    def _add(self, data: torch.Tensor) -> None:
        self._sums.append(_sums(data, self._size // 4))
        self._size += data.numel()

    def hexdigest(self) -> str:
        """The checksum so far: 16 hexadecimal digits."""
        sums, size = list(self._sums), self._size
        if self._rest is not None:
            padded = torch.nn.functional.pad(self._rest, (0, -self._rest.numel() % 4))
            sums.append(_sums(padded, size // 4))
            size += padded.numel()
        if not sums:
            return f"{0:016x}"
        words = np.concatenate([part.cpu().numpy() for part in sums]).astype(np.uint32)
        halves = _mixed(words ^ np.uint32(size & 0xFFFFFFFF)).astype(np.uint64)
        total = int(((halves[:, 0] << np.uint64(32)) | halves[:, 1]).sum(dtype=np.uint64))
        return f"{_finalized(total):016x}"


def _sums(data: torch.Tensor, start: int) -> torch.Tensor:
    """Both sums of each tile, int64 [tiles, 2], of bytes whose first word is at place `start`.

    Unsigned 32-bit numbers are int32 of the same bits here: PyTorch has few operations on
    uint32.
    """
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    places = torch.arange(words.numel(), dtype=torch.int32, device=data.device).add_(_signed(start))
    sums = []
    for multiplier, seed, by in _PLACES:
        turned = (places << by) | _shifted(places, 32 - by)
        mixed = places.mul(_signed(multiplier)).add_(_signed(seed)).bitwise_xor_(turned).bitwise_xor_(words)
        for shift, factor in ((16, _MIX_1), (13, _MIX_2)):
            mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
        mixed.bitwise_xor_(_shifted(mixed, 16))
        tiles = [t.sum(dtype=torch.int64) for t in mixed.split(_TILE // 4)]
        sums.append(torch.stack(tiles) & 0xFFFFFFFF)
    return torch.stack(sums, 1)


def _signed(value: int) -> int:
    """The int32 of the same bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift, with zeros from the left: PyTorch's own repeats the sign."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _mixed(words: Words) -> Words:
    """MurmurHash3's 32-bit finalizer."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(_MIX_1)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(_MIX_2)
    return words ^ (words >> np.uint32(16))


def _finalized(value: int) -> int:
    """splitmix64's finalizer."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _WHOLE
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _WHOLE
    return value ^ value >> 31


CHECKSUMS: Mapping[str, Callable[[], Checksum]] = {"sha256": Sha256Checksum, "tiled": TiledChecksum}
"""Kinds of checksums, and what makes one."""


def checksum_kind(device: str) -> str:
    """The kind of checksums of an engine whose weights are on such a device."""
    return "sha256" if device == "cpu" else "tiled"
