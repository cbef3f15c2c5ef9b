"""Checkpoints: Hugging Face directories in the store, with the optimizer's state beside the
weights.

A directory is written under a temporary name, made durable and renamed, so one that exists is
complete. Its `rollbook.json` holds the digests of all tensors together and of each tensor;
loading checks them. Weights may come as a stream, with one tensor in memory at a time. Ranks may
write their pieces instead (`checkpoints.shards`): reading gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollbook.engines.model_files import MANIFEST, is_sharded
from rollbook.engines.weights.digests import Tensors, digest_tensors, line_of, read_weights, stream_files
from rollbook.store.digest import combine
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.safe_paths import place_inside, reading
from rollbook.train.checkpoints.assembled import assembled
from rollbook.train.checkpoints.directory import (
    LORA,
    SHARDS,
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
from rollbook.train.checkpoints.tensor_file import TensorKind, kind_of, write_tensors
from rollbook.train.config.lora import LoraTraining, recorded_lora
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import weight_shapes

OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "model.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
ADAPTER = "adapter.safetensors"
_FILES = {
    "optimizer": OPTIMIZER,
    "critic": CRITIC,
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
) -> CheckpointWritten:
    """Write a checkpoint durably; returns the event that records it.

    Args:
        weights: named tensors, or a stream of all of them in the order of `weight_names.plan`.
        like: a model directory whose other files (config, tokenizer, template) are copied.
        critic: weights and optimizer state of the critic.
        adapter: the low-rank factors whose products are merged into the weights.
        scores: width of the head of a reward model that begins here; `like` may be a policy.

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
        saved = save_weights(weights, building, like)
        own = (optimizer, *(critic or (None, None)), adapter and adapter.tensors)
        beside = zip(_FILES.items(), own, strict=True)
        lines = {what: _save(t, building / file) for (what, file), t in beside if t is not None}
        size = size_of(building)
        digests = [
            None if part is None else combine(part.values()) for part in (saved, lines.get("optimizer"))
        ]
        record = CheckpointWritten(policy, version, str(name), str(digests[0]), digests[1], phase, size)
        manifest = manifest_of(run, record, {"weights": saved} | lines)
        manifest |= {} if adapter is None else {LORA: adapter.lora.described}
        write_manifest(building, manifest)
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
        _check(path, held, digests, lambda what: _damage(held[what], manifest.get(TENSORS[what])))
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
    if digest_tensors(weights) != digest:
        return checkpoint_named(path, digest).weights  # which says what is damaged, or named otherwise
    return weights


def checkpoint_named(path: Path, digest: str) -> Checkpoint:
    """A whole checkpoint. Arguments and errors as of `weights_named`."""
    held = read_checkpoint(path)
    if digest_tensors(held.weights) != digest:
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
        if digest_tensors(tensors) != digests[what]:
            raise ModelError(f"{path}: {what} damaged: {damage(what)}")


def _damage(tensors: Tensors, recorded: Any) -> str:
    """Which tensors differ from their digests in the manifest, for an error message."""
    if not isinstance(recorded, dict):
        return f"they are not what {MANIFEST} names"
    actual = hashes({name: line_of(name, tensor) for name, tensor in tensors.items()})
    odd = sorted(name for name in actual | recorded if actual.get(name) != recorded.get(name))
    if not odd:
        return f"their types, shapes or {MANIFEST} itself changed"
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return f"{', '.join(odd[:3])}{more} (not what {MANIFEST} names)"


def save_weights(
    weights: Tensors | Iterator[tuple[str, torch.Tensor]], building: Path, like: Path
) -> dict[str, str]:
    """Write weights beside a config.json, and make it name their type; returns the line of each
    tensor in their digest. Arguments and errors as of `write_checkpoint`."""
    config = building / "config.json"
    if isinstance(weights, dict):
        name_dtype(config, next(iter(weights.values())).dtype)
        return _save(weights, building / WEIGHTS)
    first = next(weights)
    name_dtype(config, first[1].dtype)
    return save_stream(building / WEIGHTS, _again(first, weights), like)


def save_stream(file: Path, weights: Iterator[tuple[str, torch.Tensor]], like: Path) -> dict[str, str]:
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
    return write_tensors(file, kinds, _again(first, weights))


def _again(
    first: tuple[str, torch.Tensor], rest: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield first
    yield from rest


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, str]:
    # The widest types first, so that each tensor lies at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return write_tensors(file, {name: kind_of(tensor) for name, tensor in ordered}, ordered)


def _load(file: Path) -> Tensors:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return tensors
