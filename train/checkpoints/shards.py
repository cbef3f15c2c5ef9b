"""Writes a sharded checkpoint: each rank of the training adds files of its own pieces, so that
nothing is gathered.

A piece's name says which numbers of the whole model it holds, so that any layout can read it:

    optimizer/decoder.layers.0.mlp.linear_fc1.weight/exp_avg/1-of-2/64x32/512

kind, Megatron's tensor, field of the optimizer's state, part of the tensor, the part's shape,
first number.

Writes a safetensors file tensor by tensor, and computes each tensor's digest while writing.

The format is a length (8 bytes, little-endian), that many bytes of JSON (name -> type, shape and place in
the data), and the data without gaps: https://huggingface.co/docs/safetensors, "Format". The JSON comes
first, so names, types and shapes have to be known before the tensors are.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from rollbook.engines.weights.digests import line_of, lines_of_stream, tensor_bytes
from rollbook.store.digest import combine
from rollbook.store.errors import ConfigError, ModelError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.permissions import make_empty, open_file
from rollbook.store.safe_paths import place_inside
from rollbook.store.sealed.parquet import sha256_of
from rollbook.train.checkpoints.directory import (
    LORA,
    SHARDS,
    building_beside,
    checkpoint_name,
    copy_along,
    free_name,
    hashes,
    make_durable,
    manifest_of,
    name_dtype,
    size_of,
    write_manifest,
)
from rollbook.train.config.lora import LoraTraining
from rollbook.train.model.reshard import Address, Given, Pieces
from rollbook.train.ranks.policy import Policy

POLICY, CRITIC = "shard", "critic-shard"
"""What the names of the policy's files begin with, and of its critic's."""
FILE = re.compile(rf"({POLICY}|{CRITIC})-(\d{{5}})-of-(\d{{5}})\.safetensors")
WORD = "word"
"""A file with a random word, by which ranks see that they look at rank 0's folder."""
_KINDS: dict[Given, str] = {"weights": "weights", "state": "optimizer", "adapter": "adapter"}
_PIECE = re.compile(
    rf"({'|'.join(_KINDS.values())})/([\w.]+)/(\w*)/(\d{{1,5}})-of-(\d{{1,5}})/"
    r"((?:\d{1,15}x)*\d{1,15})?/(\d{1,15})",
    re.ASCII,
)


def file_name(whose: str, rank: int, count: int) -> str:
    """The name of a rank's file."""
    return f"{whose}-{rank + 1:05d}-of-{count:05d}.safetensors"


def piece_name(address: Address) -> str:
    """The name of a piece in a file."""
    part = f"{address.part}-of-{address.parts}"
    dims = "x".join(map(str, address.dims))
    return f"{_KINDS[address.kind]}/{address.weight}/{address.field}/{part}/{dims}/{address.start}"


def address_of(name: str) -> Address | None:
    """The address that a piece's name stands for; None if it is no such name."""
    if (match := _PIECE.fullmatch(name)) is None:
        return None
    kind = next(kind for kind, word in _KINDS.items() if word == match[1])
    dims = tuple(map(int, match[6].split("x"))) if match[6] else ()
    return Address(kind, match[2], match[3], int(match[4]), int(match[5]), dims, int(match[7]))


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that a rank wrote: its name, its sha256, and the hash of each piece by name."""

    name: str
    sha256: str
    pieces: dict[str, str]


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Writes a rank's pieces into a folder, durably. It is sent to other ranks.

    Attributes:
        folder: as all ranks see it.
        whose: POLICY or CRITIC.
    """

    folder: Path
    whose: str

    def __call__(self, rank: int, count: int, pieces: Pieces) -> Shard:
        """Write the pieces.

        Raises:
            OSError: the disk is full, or the folder is not there.
        """
        name = file_name(self.whose, rank, count)
        # The widest types first, so that each piece lies at a multiple of its own width.
        named = sorted(
            ((piece_name(address), numbers) for address, numbers in pieces),
            key=lambda item: -item[1].dtype.itemsize,
        )
        kinds = {piece: kind_of(numbers) for piece, numbers in named}
        lines = write_tensors(self.folder / name, kinds, named)
        return Shard(name, sha256_of(self.folder / name), hashes(lines))


@dataclass(frozen=True, slots=True)
class LeaderFlagProbe:
    """Looks for the word that rank 0 wrote in a folder. It is sent to other ranks."""

    folder: Path
    word: str

    def __call__(self, rank: int, count: int, pieces: Pieces) -> str | None:
        """The rank's host if it does not see the word."""
        try:
            if (self.folder / WORD).read_text() == self.word:
                return None
        except OSError:
            pass
        return socket.gethostname()


def shard_error(file: Path, why: str) -> ModelError:
    """The error for a file that is not what was written."""
    return ModelError(f"{file}: {why}: restore the checkpoint from a copy")


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What is in a checkpoint: a policy, the training of its low-rank factors, its critic; and whether the
    digests of its run's weights are by blocks."""

    policy: Policy
    lora: LoraTraining | None = None
    critic: Policy | None = None
    tree: bool = True

    def digests(self) -> Json:
        """Digests of whole tensors, as in the manifest; a step knows all but that of the factors."""
        digests = {
            "weights": self.policy.weights_digest(tree=self.tree).digest,
            "optimizer": self.policy.optimizer_digest().digest,
        }
        if self.critic is not None:
            digests |= {
                "critic": self.critic.weights_digest(tree=self.tree).digest,
                "critic_optimizer": self.critic.optimizer_digest().digest,
            }
        if self.lora is not None:
            lines = lines_of_stream(self.policy.adapter().items(), tree=self.tree)
            digests["adapter"] = combine(lines, tree=self.tree)
        return {f"{what}_digest": digest for what, digest in digests.items()}


def begin_sharded(
    store: Path,
    run: str,
    policy: str,
    version: int,
    trained: Trained,
    *,
    like: Path,
    phase: str,
    dtype: Any,
    meanwhile: bool,
) -> Callable[[], CheckpointWritten]:
    """Begin a sharded checkpoint.

    Args:
        like: a model directory whose other files (config, tokenizer, template) are copied.
        dtype: torch's type of the weights.
        meanwhile: ranks copy their pieces first, and write while training goes on.

    Returns:
        A function that waits until all ranks have written, makes the checkpoint durable, and
        returns the event that records it. It has to be called, once, in whichever thread.

    Raises:
        ShortageError: the disk is full; the result raises it too, and RankError, which names a
            rank that failed. Nothing of the checkpoint is left then.
    """
    name = free_name(store, checkpoint_name(run, policy, version))
    target = place_inside(store, str(name)).absolute()  # other ranks have working directories of their own
    tensor_digests = trained.digests()
    with contextlib.ExitStack() as stack:
        building = stack.enter_context(building_beside(target))
        copy_along(like, building)
        name_dtype(building / "config.json", dtype)
        waits = [trained.policy.each(WriteShard(building, POLICY), meanwhile=meanwhile)]
        if trained.critic is not None:
            waits.append(trained.critic.each(WriteShard(building, CRITIC), meanwhile=meanwhile))
        whole = stack.pop_all()

    def finish() -> CheckpointWritten:
        with whole:
            shards = [shard for wait in waits for shard in wait()]
            digests = tensor_digests["weights_digest"], tensor_digests["optimizer_digest"]
            record = CheckpointWritten(policy, version, str(name), *digests, phase, size_of(building))
            manifest = _manifest(run, record, tensor_digests, shards, trained.lora)
            write_manifest(building, manifest, {shard.name: shard.sha256 for shard in shards})
            make_durable(building, target)
        return record

    return finish


def _manifest(
    run: str, record: CheckpointWritten, digests: Json, shards: list[Shard], lora: LoraTraining | None
) -> Json:
    manifest = (
        manifest_of(run, record, {}) | digests | {SHARDS: {shard.name: shard.pieces for shard in shards}}
    )
    del manifest["optimizer_tensors"]  # of whole tensors, which nobody has
    return manifest if lora is None else manifest | {LORA: lora.described}


def check_shared(store: Path, run: str, policy: str, trainable: Policy) -> None:
    """Check that every rank sees the store's folder at the same path, by a random word in a file
    there.

    Raises:
        ConfigError: one does not; it names the rank, its host and the folder.
    """
    name = free_name(store, checkpoint_name(run, policy, 0))
    with building_beside(place_inside(store, str(name)).absolute()) as building:
        word = secrets.token_hex(8)
        make_empty(building / WORD).write_text(word)
        for rank, host in enumerate(trainable.each(LeaderFlagProbe(building, word))()):
            if host is not None:
                raise ConfigError(
                    f"rank {rank} on {host} does not see what rank 0 wrote in the store, {store.absolute()}: "
                    "with checkpoint.sharded = true every rank writes there. Let all hosts have that folder, "
                    "on a shared disk, or set checkpoint.sharded = false"
                )
        shutil.rmtree(building)


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
    file: Path,
    kinds: Mapping[str, TensorKind],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tree: bool = False,
) -> dict[str, str]:
    """Write tensors in the order of `kinds`, durably; returns name -> line for the digest of the
    set, a tree's or one of bytes.

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
            lines[name] = line_of(name, held, tree=tree)
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
