"""Checkpoints: Hugging Face directories in the store, with the optimizer's state beside the
weights.

A directory is written under a temporary name, made durable and renamed, so one that exists is
complete. Its `rollbook.json` holds the digests of all tensors together and of each tensor;
loading checks them. Weights may come as a stream, with one tensor in memory at a time. Ranks may
write their pieces instead (`checkpoints.shards`): reading gives the same.

Assembles the tensors of a checkpoint from the pieces that ranks wrote, one tensor at a time.

What the files claim is not trusted: a part of a tensor is built only after its pieces are
checked to cover all of it, without gap or overlap, in the shape that the model's config.json
asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rollbook.engines.model_files import MANIFEST, is_sharded
from rollbook.engines.weights.digests import Tensors, digest_like, line_of, read_weights, stream_files
from rollbook.store.digest import combine, is_tree
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.safe_paths import place_inside, reading, refuse_no_plain
from rollbook.train.checkpoints.directory import (
    LORA,
    SHARDS,
    STATES,
    TENSORS,
    building_beside,
    checkpoint_name,
    copy_along,
    free_name,
    hashes,
    make_durable,
    manifest_in,
    manifest_of,
    name_dtype,
    name_head,
    size_of,
    write_manifest,
)
from rollbook.train.checkpoints.shards import (
    CRITIC,
    FILE,
    POLICY,
    TensorKind,
    address_of,
    file_name,
    kind_of,
    shard_error,
    write_tensors,
)
from rollbook.train.config.lora import LoraTraining, recorded_lora
from rollbook.train.model.lora import factors, merged
from rollbook.train.model.reshard import Address, Given, joined
from rollbook.train.model.score_head import critic_shape
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.model.weight_names import Weight, fuse_experts, parts, plan, shard, weight_shapes

OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "model.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
ADAPTER = "adapter.safetensors"
_FILES = {
    "optimizer": OPTIMIZER,
    "critic": "critic.safetensors",
    "critic_optimizer": CRITIC_OPTIMIZER,
    "adapter": ADAPTER,
}
"""What a checkpoint may hold beside its weights, each in a file of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Low-rank factors under PEFT's names, and the training that made them."""

    tensors: Tensors
    lora: LoraTraining


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a checkpoint holds. `optimizer` is None where only weights were written; so are the critic's
    weights and optimizer, and also where the algorithm has no critic. `adapter` is None where no low-rank
    factors were trained; otherwise the weights have their products in them."""

    weights: Tensors
    optimizer: Tensors | None = None
    critic: Tensors | None = None
    critic_optimizer: Tensors | None = None
    adapter: Adapter | None = None


def write_checkpoint(
    store: Path,
    run: str,
    policy: str,
    version: int,
    weights: Tensors | Iterator[tuple[str, torch.Tensor]],
    optimizer: Tensors | None,
    *,
    like: Path,
    phase: str | None,
    critic: tuple[Tensors, Tensors] | None = None,
    adapter: Adapter | None = None,
    scores: int = 0,
    tree: bool = True,
) -> CheckpointWritten:
    """Write a checkpoint durably; returns the event that records it.

    Args:
        weights: named tensors, or a stream of all of them in the order of `weight_names.plan`.
        like: a model directory whose other files (config, tokenizer, template) are copied.
        critic: weights and optimizer state of the critic.
        adapter: the low-rank factors whose products are merged into the weights.
        scores: width of the head of a reward model that begins here; `like` may be a policy.
        tree: whether weights are digested by blocks, as the run's others are.

    Raises:
        ModelError: a stream is not that of the model that `like` describes.
        ShortageError: the disk is full. Nothing of the checkpoint is left.
    """
    name = free_name(store, checkpoint_name(run, policy, version))
    target = place_inside(store, str(name))
    with building_beside(target) as building:
        copy_along(like, building)
        if scores:
            name_head(building / "config.json", scores)
        saved = save_weights(weights, building, like, tree=tree)
        own = (optimizer, *(critic or (None, None)), adapter and adapter.tensors)
        lines = _save_beside(building, own, tree=tree)
        size = size_of(building)
        state = None if optimizer is None else combine(lines["optimizer"].values(), tree=True)
        digests = combine(saved.values(), tree=tree), state
        record = CheckpointWritten(policy, version, str(name), *digests, phase, size)
        manifest = manifest_of(run, record, {"weights": saved} | lines)
        manifest |= {} if adapter is None else {LORA: adapter.lora.described}
        write_manifest(building, manifest, None if optimizer is None else {})
        make_durable(building, target)
    return record


def read_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint, whole or of shards, and check it against its own manifest.

    Raises:
        ModelError: files are missing or damaged.
    """
    with reading(path):
        return _read(path)


def _read(path: Path) -> Checkpoint:
    manifest = manifest_in(path)
    try:
        digests = {what: manifest[f"{what}_digest"] for what in ("weights", "optimizer")}
        later = ("critic", "critic_optimizer", "adapter")
        digests |= {what: manifest.get(f"{what}_digest") for what in later}
    except KeyError as error:
        raise ModelError(f"{path / MANIFEST}: cannot be read: {error!r}") from error
    lora = _lora_in(path, manifest)
    there = [what for what, digest in digests.items() if digest is not None]
    if SHARDS in manifest:
        with assembled(path, manifest[SHARDS], lora) as shards:
            held = {what: dict(shards.stream(what)) for what in there}
            _check(path, held, digests, shards.damage)
    else:
        held = {what: _load(path / _FILES[what]) for what in there if what != "weights"}
        held["weights"] = read_weights(path)
        recorded = {what: manifest.get(TENSORS[what]) for what in there}
        _check(path, held, digests, lambda what: _damage(held[what], recorded[what], digests[what]))
    factors = held.pop("adapter", None)
    adapter = None if factors is None or lora is None else Adapter(factors, lora)
    return Checkpoint(**held, adapter=adapter)


def weights_named(path: Path, digest: str) -> Tensors:
    """The weights of a checkpoint alone.

    Args:
        digest: of them, as the log has it.

    Raises:
        ModelError: files are missing or damaged, or the log names others.
    """
    weights = dict(stream_checkpoint(path))
    if digest_like(weights, digest) != digest:
        return checkpoint_named(path, digest).weights  # which says what is damaged, or named otherwise
    return weights


def checkpoint_named(path: Path, digest: str) -> Checkpoint:
    """A whole checkpoint. Arguments and errors as of `weights_named`."""
    held = read_checkpoint(path)
    if digest_like(held.weights, digest) != digest:
        raise ModelError(f"{path}: its weights are not those the log names")
    return held


def stream_checkpoint(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint, whole or sharded, one at a time, without any check against
    digests.

    Raises:
        ModelError: files are missing or damaged.
    """
    if not is_sharded(path):
        yield from stream_files(path)
        return
    with reading(path):
        manifest = manifest_in(path)
        with assembled(path, manifest.get(SHARDS), _lora_in(path, manifest)) as shards:
            yield from shards.stream("weights")


def _lora_in(path: Path, manifest: Json) -> LoraTraining | None:
    try:
        return None if manifest.get(LORA) is None else recorded_lora(manifest[LORA])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path / MANIFEST}: cannot be read: {error!r}") from error


def _check(
    path: Path, held: Mapping[str, Tensors], digests: Mapping[str, Any], damage: Callable[[str], str]
) -> None:
    """Compare what was read with the manifest's digests.

    Args:
        damage: says where the damage is, in what has another digest.

    Raises:
        ModelError: a digest differs.
    """
    for what, tensors in held.items():
        if digest_like(tensors, digests[what]) != digests[what]:
            raise ModelError(f"{path}: {what} damaged: {damage(what)}")


def _damage(tensors: Tensors, recorded: Any, digest: str) -> str:
    """Which tensors differ from their hashes in the manifest, for an error message."""
    if not isinstance(recorded, dict):
        return f"they are not what {MANIFEST} names"
    tree = is_tree(digest)
    actual = hashes({name: line_of(name, tensor, tree=tree) for name, tensor in tensors.items()})
    odd = sorted(name for name in actual | recorded if actual.get(name) != recorded.get(name))
    if not odd:
        return f"their types, shapes or {MANIFEST} itself changed"
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return f"{', '.join(odd[:3])}{more} (not what {MANIFEST} names)"


def save_weights(
    weights: Tensors | Iterator[tuple[str, torch.Tensor]], building: Path, like: Path, *, tree: bool = True
) -> dict[str, str]:
    """Write weights beside a config.json, and make it name their type; returns the line of each
    tensor in their digest. Arguments and errors as of `write_checkpoint`."""
    config = building / "config.json"
    if isinstance(weights, dict):
        name_dtype(config, next(iter(weights.values())).dtype)
        return _save(weights, building / WEIGHTS, tree=tree)
    first = next(weights)
    name_dtype(config, first[1].dtype)
    return save_stream(building / WEIGHTS, _again(first, weights), like, tree=tree)


def save_stream(
    file: Path, weights: Iterator[tuple[str, torch.Tensor]], like: Path, *, tree: bool = True
) -> dict[str, str]:
    """Write a stream of weights with one tensor in memory at a time; returns each one's line in
    their digest.

    Args:
        like: a model directory, whose config.json says which weights come.

    Raises:
        ModelError: other weights come.
    """
    first = next(weights)
    dtype = first[1].dtype  # one type for all tensors, since config.json names one
    kinds = {name: TensorKind(dtype, dims) for name, dims in weight_shapes(read_shape(like)).items()}
    return write_tensors(file, kinds, _again(first, weights), tree=tree)


def _again(
    first: tuple[str, torch.Tensor], rest: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield first
    yield from rest


def _save_beside(building: Path, own: Sequence[Tensors | None], *, tree: bool) -> dict[str, dict[str, str]]:
    """Write what a checkpoint holds beside its weights, of `_FILES`; the lines of each that there is."""
    return {
        what: _save(tensors, building / file, tree=tree or what in STATES)
        for (what, file), tensors in zip(_FILES.items(), own, strict=True)
        if tensors is not None
    }


def _save(tensors: Mapping[str, torch.Tensor], file: Path, *, tree: bool) -> dict[str, str]:
    # The widest types first, so that each tensor lies at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return write_tensors(file, {name: kind_of(tensor) for name, tensor in ordered}, ordered, tree=tree)


def _load(file: Path) -> Tensors:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return tensors


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
        self._path, self._shards, self._lora, self._pieces = path, shards, lora, pieces
        self._shape = read_shape(path)
        self._by_weight: dict[_Key, dict[str, list[Piece]]] = {}
        for piece in pieces:
            whose = CRITIC if piece.file.name.startswith(CRITIC) else POLICY
            key = (whose, piece.address.kind, piece.address.weight)
            self._by_weight.setdefault(key, {}).setdefault(piece.address.field, []).append(piece)
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
        for key, of_fields in self._by_weight.items():
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
            ModelError: pieces are missing, too many, or not of the model's shapes; or products cannot be
                merged.
        """
        match what:
            case "weights" if self._lora is not None:
                return merged(self._weights(POLICY), self._adapter(), self._shape, self._lora.config)
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
            if actual[piece.name] != self._shards[piece.file.name][piece.name]:
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
            for field in sorted(self._by_weight.get((whose, "state", weight.megatron), {})):
                shards = self._parts(whose, "state", weight, field)
                whole = shards[0] if not shards[0].dim() else joined(weight, shards, shape)
                yield f"{weight.megatron}.{field}", whole

    def _parts(self, whose: str, kind: Given, weight: Weight, field: str = "") -> list[torch.Tensor]:
        """A tensor's parts, each put together."""
        pieces = self._by_weight.get((whose, kind, weight.megatron), {}).get(field)
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
