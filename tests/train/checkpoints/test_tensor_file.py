"""The writer of safetensors files: what safetensors' own reader finds is what was given."""

from __future__ import annotations

import struct
from pathlib import Path

import orjson
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollbook.engines.weights.digests import digest_tensors, line_of
from rollbook.store.digest import combine
from rollbook.store.errors import ModelError
from rollbook.train.checkpoints.shards import kind_of, write_tensors

TENSORS = {
    "double": torch.arange(3, dtype=torch.float64),
    "whole": torch.arange(6, dtype=torch.int64).view(2, 3),
    "single": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)),
    "transposed": torch.arange(12, dtype=torch.float32).view(3, 4).T,
    "strided": torch.arange(24, dtype=torch.float32).view(4, 6)[1:3, ::2],
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
    "brain": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "half": torch.tensor([1.5], dtype=torch.float16),
    "small": torch.tensor([1, 2, 3], dtype=torch.int32),
    "truth": torch.tensor([True, False, True]),
    "ns/ä": torch.tensor([1, 255], dtype=torch.uint8),
}


def _write(file: Path) -> dict[str, str]:
    return write_tensors(file, {n: kind_of(t) for n, t in TENSORS.items()}, TENSORS.items())


def test_safetensors_reads_it(tmp_path: Path) -> None:
    """Types, shapes and bytes come back, of views too; the file ends with the last tensor."""
    _write(tmp_path / "t.safetensors")
    loaded = load_file(tmp_path / "t.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        original, back = (t.contiguous().flatten().view(torch.uint8).tolist() for t in (tensor, loaded[name]))
        assert back == original, name
    with safe_open(tmp_path / "t.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    """Length, JSON filled up to a multiple of 8, then the data in order without gaps."""
    _write(tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = orjson.loads(data[8 : 8 + length])
    places = [header[name]["data_offsets"] for name in TENSORS]
    assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
    assert 8 + length + places[-1][1] == len(data)
    assert header["transposed"]["shape"] == [4, 3]
    start, end = header["transposed"]["data_offsets"]
    assert data[8 + length + start : 8 + length + end] == TENSORS["transposed"].contiguous().numpy().tobytes()


def test_lines_make_the_one_digest(tmp_path: Path) -> None:
    """What is digested while writing is what `digest_tensors` says, and what one tensor's line is alone."""
    lines = _write(tmp_path / "t.safetensors")
    assert combine(lines.values()) == digest_tensors(TENSORS)
    assert lines == {name: line_of(name, tensor) for name, tensor in TENSORS.items()}


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A tensor is on its way to the file before the next one is asked for."""
    kinds = {str(i): kind_of(torch.zeros(1000)) for i in range(3)}
    sizes = []

    def stream() -> object:
        for name in kinds:
            sizes.append((tmp_path / "t").stat().st_size)
            yield name, torch.ones(1000)

    write_tensors(tmp_path / "t", kinds, stream())  # type: ignore[arg-type]
    assert [size - sizes[0] for size in sizes] == [0, 4000, 8000]


def test_an_unknown_type_is_told(tmp_path: Path) -> None:
    """A type that is not written is an error before there is a file."""
    odd = {"z": torch.zeros(1, dtype=torch.complex64)}
    with pytest.raises(ModelError, match=r"z is torch.complex64, .* torch.float32"):
        write_tensors(tmp_path / "t", {"z": kind_of(odd["z"])}, odd.items())
    assert not (tmp_path / "t").exists()
