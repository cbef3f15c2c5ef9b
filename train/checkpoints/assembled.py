"""Assembles the tensors of a checkpoint from the pieces that ranks wrote, one tensor at a time.

What the files claim is not trusted: a part of a tensor is built only after its pieces are
checked to cover all of it, without gap or overlap, in the shape that the model's config.json
asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollbook.engines.model_files import MANIFEST
from rollbook.engines.weights.digests import Tensors, line_of
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.safe_paths import refuse_no_plain
from rollbook.train.checkpoints.directory import hashes
from rollbook.train.checkpoints.shards import CRITIC, FILE, POLICY, address_of, file_name, shard_error
from rollbook.train.config.lora import LoraTraining
from rollbook.train.model.lora import factors, merged
from rollbook.train.model.reshard import Address, Given, joined
from rollbook.train.model.score_head import critic_shape
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.model.weight_names import Weight, fuse_experts, parts, plan, shard

_Key = tuple[str, Given, str]
"""Whose tensor it is, what of it, and its name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece in an open file."""

    file: Path
    handle: Any
    name: str
    address: Address
    count: int
    dtype: str

    def numbers(self) -> torch.Tensor:
        """Its numbers as a flat tensor, read now."""
        tensor: torch.Tensor = self.handle.get_tensor(self.name)
        return tensor


@contextlib.contextmanager
def assembled(path: Path, shards: Any, lora: LoraTraining | None) -> Iterator[Assembled]:
    """The tensors of a sharded checkpoint, whose files stay open within the context.

    Args:
        shards: the manifest's files, and the hash of each piece in them.
        lora: the training of low-rank factors, if the checkpoint is of one.

    Raises:
        ModelError: a file is missing, damaged, or not what the manifest names.
    """
    with contextlib.ExitStack() as stack:
        pieces = [piece for file in _files(path, shards) for piece in _opened(file, shards[file.name], stack)]
        yield Assembled(path, shards, lora, pieces)


def _files(path: Path, shards: Any) -> list[Path]:
    """The files that a manifest names: those of all ranks for the policy, and all or none for the
    critic."""
    known = isinstance(shards, dict) and all(isinstance(pieces, dict) for pieces in shards.values())
    matches = [FILE.fullmatch(name) for name in shards] if known else []
    counts = {match[1]: int(match[3]) for match in matches if match is not None}
    whole = {
        file_name(whose, rank, count)
        for whose, count in counts.items()
        for rank in range(min(count, len(matches)))
    }
    if not known or POLICY not in counts or None in matches or set(shards) != {*whole} & {*shards}:
        raise shard_error(path / MANIFEST, "its shards are not what ranks write")
    if len(shards) != sum(counts.values()):
        raise shard_error(path / MANIFEST, f"names {len(shards)} of {sum(counts.values())} shards")
    return [path / name for name in sorted(shards)]


def _opened(file: Path, expected: dict[str, Any], stack: contextlib.ExitStack) -> Iterator[Piece]:
    whose = file.name.rpartition("-of-")[0].rpartition("-")[0]
    if not file.exists():
        raise shard_error(file, "is missing")
    try:
        refuse_no_plain(file)
        handle = stack.enter_context(safe_open(file, framework="pt"))
        names = set(handle.keys())
    except OutsideError as error:
        raise ModelError(str(error)) from error
    except Exception as error:  # safetensors has errors of its own
        raise shard_error(file, f"cannot be read: {error}") from error
    if odd := sorted(names ^ set(expected)):
        raise shard_error(file, f"holds other pieces than {MANIFEST} names, such as {odd[0]!r}")
    for name in sorted(names):
        address, slice_ = address_of(name), handle.get_slice(name)
        dims = slice_.get_shape()
        if address is None or len(dims) != 1 or (whose == CRITIC and address.kind == "adapter"):
            raise shard_error(file, f"{name!r} is no piece of a tensor")
        yield Piece(file, handle, name, address, dims[0], slice_.get_dtype())


class Assembled:
    """The tensors of a checkpoint, by what it holds: `weights`, `optimizer`, `critic`, `critic_optimizer` and
    `adapter`."""

    def __init__(
        self,
        path: Path,
        shards: dict[str, dict[str, Any]],
        lora: LoraTraining | None,
        pieces: Sequence[Piece],
    ) -> None:
        self._path, self._said, self._lora, self._pieces = path, shards, lora, pieces
        self._shape = read_shape(path)
        self._found: dict[_Key, dict[str, list[Piece]]] = {}
        for piece in pieces:
            whose = CRITIC if piece.file.name.startswith(CRITIC) else POLICY
            key = (whose, piece.address.kind, piece.address.weight)
            self._found.setdefault(key, {}).setdefault(piece.address.field, []).append(piece)
        self._check_known()

    def _check_known(self) -> None:
        """Check that every piece belongs to a tensor of the model."""
        known: set[_Key] = set()
        for whose in (POLICY, CRITIC):
            shape, trained = self._shape_of(whose), self._trained(whose)
            known |= {(whose, "weights", weight.megatron) for weight in plan(shape)}
            known |= {(whose, "state", weight.megatron) for weight in trained}
            if self._lora is not None:
                known |= {(POLICY, "adapter", weight.megatron) for weight in trained}
        for key, of_fields in self._found.items():
            if key not in known:
                piece = next(iter(of_fields.values()))[0]
                raise shard_error(piece.file, f"the model has no tensor of which {piece.name!r} is a piece")

    def _shape_of(self, whose: str) -> ModelShape:
        return critic_shape(self._shape) if whose == CRITIC else self._shape

    def _trained(self, whose: str) -> tuple[Weight, ...]:
        if whose == CRITIC or self._lora is None:
            return plan(self._shape_of(whose))
        return factors(self._shape, self._lora.config)

    def stream(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, one at a time, as whole checkpoints name them. Weights of a training of low-rank
        factors have their products in them.

        Raises:
            ModelError: pieces are missing, too many, or not of the model's shapes.
        """
        match what:
            case "weights" if self._lora is not None:
                return merged(self._weights(POLICY), self._adapter(), self._lora.config.scale)
            case "weights":
                return self._weights(POLICY)
            case "critic":
                return self._weights(CRITIC)
            case "adapter":
                return iter(self._adapter().items())
        return self._state(CRITIC if what.startswith("critic") else POLICY)

    def damage(self, what: str) -> str:
        """The damaged pieces, whose hashes differ from those in the manifest, for an error message."""
        kinds = {"state"} if what.endswith("optimizer") else {"weights", "adapter"}
        odd = []
        for piece in self._pieces:
            of_critic = piece.file.name.startswith(CRITIC)
            if piece.address.kind not in kinds or of_critic != what.startswith("critic"):
                continue
            actual = hashes({piece.name: line_of(piece.name, piece.numbers())})
            if actual[piece.name] != self._said[piece.file.name][piece.name]:
                odd.append(f"{piece.name} in {piece.file.name}")
        if not odd:
            return f"no piece is, so {MANIFEST} itself changed"
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        return f"{', '.join(odd[:3])}{more} (not what {MANIFEST} names)"

    def _weights(self, whose: str) -> Iterator[tuple[str, torch.Tensor]]:
        shape = self._shape_of(whose)
        each = (
            zip(weight.huggingface, parts(weight, self._parts(whose, "weights", weight), shape), strict=True)
            for weight in plan(shape)
        )
        return fuse_experts((named for pair in each for named in pair), shape)

    def _adapter(self) -> Tensors:
        held: Tensors = {}
        for factor in self._trained(POLICY) if self._lora is not None else ():
            shards = self._parts(POLICY, "adapter", factor)
            held |= zip(factor.huggingface, parts(factor, shards, self._shape), strict=True)
        return held

    def _state(self, whose: str) -> Iterator[tuple[str, torch.Tensor]]:
        shape = self._shape_of(whose)
        for weight in self._trained(whose):
            for field in sorted(self._found.get((whose, "state", weight.megatron), {})):
                shards = self._parts(whose, "state", weight, field)
                whole = shards[0] if not shards[0].dim() else joined(weight, shards, shape)
                yield f"{weight.megatron}.{field}", whole

    def _parts(self, whose: str, kind: Given, weight: Weight, field: str = "") -> list[torch.Tensor]:
        """A tensor's parts, each put together."""
        pieces = self._found.get((whose, kind, weight.megatron), {}).get(field)
        if not pieces:
            raise ModelError(f"{self._path}: no shard holds {kind} {weight.megatron}: restore it from a copy")
        pieces = sorted(pieces, key=lambda piece: (piece.address.part, piece.address.start))
        first = pieces[0]
        expected = _dims_of_parts(weight, self._shape_of(whose), first.address)
        tensors = []
        for piece in pieces:
            address, known = piece.address, 0 <= piece.address.part < len(expected)
            if address.parts != first.address.parts or not known or piece.dtype != first.dtype:
                raise shard_error(
                    piece.file, f"{piece.name!r} does not fit {first.name!r} in {first.file.name}"
                )
            if address.dims not in (expected[address.part], ()) or bool(address.dims) != bool(
                first.address.dims
            ):
                raise shard_error(piece.file, f"{piece.name!r} is not of the model's shape")
        for part, dims in enumerate(expected if first.address.dims else [()]):
            tensors.append(self._whole([p for p in pieces if p.address.part == part], dims, part, first))
        return tensors

    def _whole(self, pieces: Sequence[Piece], dims: tuple[int, ...], part: int, first: Piece) -> torch.Tensor:
        """One part of a tensor, from its pieces in order."""
        at = 0
        for piece in pieces:
            if piece.address.start != at:
                how = "again" if piece.address.start < at else "after a gap"
                raise shard_error(piece.file, f"{piece.name!r} begins {how}, where number {at} comes")
            at += piece.count
        if at != prod(dims):
            near = pieces[-1] if pieces else first
            lacks = f"part {part} of {first.address.weight} has {at} numbers of {prod(dims)}"
            raise shard_error(near.file, f"{lacks}, up to {near.name!r}")
        numbers = [piece.numbers() for piece in pieces]
        return (numbers[0] if len(numbers) == 1 else torch.cat(numbers)).view(dims)


def _dims_of_parts(weight: Weight, shape: ModelShape, some: Address) -> list[tuple[int, ...]]:
    """The shape of each part of a tensor that so many ranks share; empty where they cannot."""
    fits = 0 < some.parts <= max(shape.kv_heads, 1) and shape.kv_heads % some.parts == 0
    if not fits or (weight.kind == "replicated" and some.parts > 1):
        return []
    whole = {
        name: torch.empty(dims, device="meta")
        for name, dims in zip(weight.huggingface, weight.shapes, strict=True)
    }
    return [tuple(shard(weight, whole, shape, part, some.parts).shape) for part in range(some.parts)]
