"""The files in which each rank writes its own pieces of tensors: their names, and what they call the pieces.

A piece's name says in terms of the whole model which numbers it is, so that any layout can take it up:

    optimizer/decoder.layers.0.mlp.linear_fc1.weight/exp_avg/1-of-2/64x32/512

kind, Megatron's tensor, field of the optimizer's state, part of the tensor, the part's shape, first number.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.errors import ModelError
from rollbook.train.checkpoints.directory import hashes
from rollbook.train.checkpoints.tensor_file import kind_of, write_tensors
from rollbook.train.megatron.given import Address, Given, Pieces

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
    """What a file calls a piece."""
    part = f"{address.part}-of-{address.parts}"
    dims = "x".join(map(str, address.dims))
    return f"{_KINDS[address.kind]}/{address.weight}/{address.field}/{part}/{dims}/{address.start}"


def address_of(name: str) -> Address | None:
    """The piece that a file calls so; None if it is no such name."""
    if (found := _PIECE.fullmatch(name)) is None:
        return None
    kind = next(kind for kind, word in _KINDS.items() if word == found[1])
    dims = tuple(map(int, found[6].split("x"))) if found[6] else ()
    return Address(kind, found[2], found[3], int(found[4]), int(found[5]), dims, int(found[7]))


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that a rank wrote: its name, and the hash of each piece, by the piece's name."""

    name: str
    pieces: dict[str, str]


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Writes a rank's pieces into a folder, durably. Other ranks are sent it.

    Attributes:
        folder: as all ranks see it.
        whose: POLICY or CRITIC.
    """

    folder: Path
    whose: str

    def __call__(self, rank: int, count: int, pieces: Pieces) -> Shard:
        """Write them.

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
        return Shard(name, hashes(write_tensors(self.folder / name, kinds, named)))


@dataclass(frozen=True, slots=True)
class SeeWord:
    """Looks for rank 0's word in a folder. Other ranks are sent it."""

    folder: Path
    word: str

    def __call__(self, rank: int, count: int, pieces: Pieces) -> str | None:
        """The rank's host, where it does not see it."""
        try:
            if (self.folder / WORD).read_text() == self.word:
                return None
        except OSError:
            pass
        return socket.gethostname()


def refused(file: Path, why: str) -> ModelError:
    """The error of a file that is not what it was written as."""
    return ModelError(f"{file}: {why}: restore the checkpoint from a copy")
