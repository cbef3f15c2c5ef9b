"""Writes a safetensors file tensor by tensor, and computes each tensor's digest while writing.

The format is a length (8 bytes, little-endian), that many bytes of JSON (name -> type, shape and place in
the data), and the data without gaps: https://huggingface.co/docs/safetensors, "Format". The JSON comes
first, so names, types and shapes have to be known before the tensors are.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

from rollbook.engines.weights.digests import line_of, tensor_bytes
from rollbook.store.errors import ModelError
from rollbook.store.permissions import open_file

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return self.dtype.itemsize * math.prod(self.shape)


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Type and shape of a tensor."""
    return TensorKind(tensor.dtype, tuple(tensor.shape))


def write_tensors(
    file: Path, kinds: Mapping[str, TensorKind], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Write tensors in the order of `kinds`, durably; returns name -> line for the digest of the
    set.

    One tensor is in memory at a time.

    Raises:
        ModelError: the tensors, or their order, differ from `kinds`, or are of a type that is
            not written.
    """
    header, expected, lines = _header(kinds), iter(kinds.items()), {}
    fd = open_file(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _write_all(fd, header)
        for name, tensor in tensors:
            if (name, kind_of(tensor)) != (wanted := next(expected, None)):
                raise ModelError(f"{file}: {name}, {kind_of(tensor)}, came where {wanted} was to be written")
            held = tensor.detach().cpu().contiguous()  # copied at most once
            lines[name] = line_of(name, held)
            _write_all(fd, tensor_bytes(held).data)
        if left := [name for name, _ in expected]:
            raise ModelError(f"{file}: {len(left)} tensors did not come, the first of them {left[0]}")
        os.fsync(fd)
    finally:
        os.close(fd)
    return lines


def _header(kinds: Mapping[str, TensorKind]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        if kind.dtype not in _TYPES:
            known = ", ".join(sorted(str(dtype) for dtype in _TYPES))
            raise ModelError(f"{name} is {kind.dtype}, which is not written; convert it to one of {known}")
        start, end = end, end + kind.nbytes
        entries[name] = {
            "dtype": _TYPES[kind.dtype],
            "shape": kind.shape,
            "data_offsets": [start, end],
        }
    header = orjson.dumps(entries)
    header += b" " * (-len(header) % 8)  # the data starts at a multiple of 8, as readers that map it want
    return struct.pack("<Q", len(header)) + header


def _write_all(fd: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # a single write ends at 2 GiB
        left = left[os.write(fd, left) :]
