"""Checkpoints: Hugging Face directories in the store, with the optimizer's state beside the weights.

A directory is written under a temporary name, made durable and renamed, so an existing one is complete. Its
`rollbook.json` holds the digests of all tensors together and of each tensor; loading checks them. Weights may
come as a stream: then one tensor is in memory at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollbook.ingest.engines.weights.digests import Tensors, digest_tensors, line_of, read_weights
from rollbook.store.digest import combine
from rollbook.store.durable import fsync_folder
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.ids import new_id
from rollbook.store.inside import place_inside, read_small
from rollbook.store.permissions import make_empty
from rollbook.train.checkpoints.building import building_beside
from rollbook.train.checkpoints.tensor_file import TensorKind, kind_of, write_tensors
from rollbook.train.config.lora import LoraTraining, recorded_lora
from rollbook.train.megatron.shape import SCORE_LABELS, SCORES, read_shape
from rollbook.train.megatron.weight_names import weight_shapes

MANIFEST = "rollbook.json"
LORA = "lora"
"""The manifest's key of the training of low-rank factors."""
MANIFEST_BYTES = 64 << 20
"""Largest size of the manifest, which has one line per tensor."""
OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "model.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
ADAPTER = "adapter.safetensors"
_TENSORS = {
    "weights": "tensors",
    "optimizer": "optimizer_tensors",
    "critic": "critic_tensors",
    "critic_optimizer": "critic_optimizer_tensors",
    "adapter": "adapter_tensors",
}
"""The manifest's keys of the digests by tensor."""
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3_text": "Gemma3Text",
    "gpt_oss": "GptOss",
}
"""How transformers calls the classes of each family."""
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


def checkpoint_name(run: str, policy: str, version: int) -> Path:
    """Path of a version's checkpoint, relative to the store."""
    return Path("checkpoints") / run / policy / f"v{version:08d}"


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
        adapter: the low-rank factors whose products the weights have in them.
        scores: what the head of a reward model that is begun here gives; `like` may be a policy.

    Raises:
        ModelError: a stream is not that of the model that `like` describes.
        ShortageError: the disk is full. Nothing of the checkpoint is left.
    """
    name = _free_name(store, checkpoint_name(run, policy, version))
    target = place_inside(store, str(name))
    with building_beside(target) as building:
        _copy_along(like, building)
        if scores:
            _name_head(building / "config.json", scores)
        saved = _save_weights(weights, building, like)
        own = (optimizer, *(critic or (None, None)), adapter and adapter.tensors)
        beside = zip(_FILES.items(), own, strict=True)
        lines = {what: _save(t, building / file) for (what, file), t in beside if t is not None}
        size = sum(file.stat().st_size for file in building.iterdir())
        digests = [None if of is None else combine(of.values()) for of in (saved, lines.get("optimizer"))]
        record = CheckpointWritten(policy, version, str(name), str(digests[0]), digests[1], phase, size)
        manifest = manifest_of(run, record, {"weights": saved} | lines)
        manifest |= {} if adapter is None else {LORA: adapter.lora.described}
        make_empty(building / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        _make_durable(building, target)
    return record


def _free_name(store: Path, name: Path) -> Path:
    """A checkpoint's path; another one, where an earlier attempt at its version is, which is kept."""
    return name.with_name(f"{name.name}-{new_id()[-8:]}") if (store / name).exists() else name


def manifest_of(run: str, record: CheckpointWritten, lines: Mapping[str, dict[str, str]]) -> Json:
    """What `rollbook.json` says: the digest of all that is held, together and by tensor."""
    said: Json = {"run": run, "policy": record.policy, "policy_version": record.policy_version}
    said |= {"optimizer_digest": None, _TENSORS["optimizer"]: {}}
    for what, of_tensors in lines.items():
        said |= {f"{what}_digest": combine(of_tensors.values()), _TENSORS[what]: _hashes(of_tensors)}
    return said


def _copy_along(like: Path, building: Path) -> None:
    """Copy the files of a model directory that are not weights."""
    for file in like.iterdir():
        if file.is_file() and not holds_weights(file.name):
            shutil.copyfile(file, make_empty(building / file.name))


def _make_durable(building: Path, target: Path) -> None:
    """Give a finished folder its name, every byte of it on disk first."""
    for file in building.iterdir():
        _fsync(file)
    fsync_folder(building)
    building.rename(target)
    fsync_folder(target.parent)


def read_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint and check it against its own manifest.

    Raises:
        ModelError: files are missing or damaged.
    """
    file = path / MANIFEST
    if not file.exists():
        raise ModelError(f"{path}: holds no {MANIFEST}, so it is no checkpoint")
    try:
        manifest = orjson.loads(read_small(file, MANIFEST_BYTES))
        digests = {what: manifest[f"{what}_digest"] for what in ("weights", "optimizer")}
        later = ("critic", "critic_optimizer", "adapter")
        digests |= {what: manifest.get(f"{what}_digest") for what in later}
        lora = None if manifest.get(LORA) is None else recorded_lora(manifest[LORA])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from error
    held: dict[str, Any] = {"weights": read_weights(path)}
    held |= {what: _load(path / file) for what, file in _FILES.items() if digests[what] is not None}
    for what, tensors in held.items():
        if digest_tensors(tensors) != digests[what]:
            raise ModelError(f"{path}: {what} damaged: {_damage(tensors, manifest.get(_TENSORS[what]))}")
    factors = held.pop("adapter", None)
    adapter = None if factors is None or lora is None else Adapter(factors, lora)
    return Checkpoint(**held, adapter=adapter)


def weights_named(path: Path, digest: str) -> Tensors:
    """The weights of a checkpoint.

    Args:
        digest: of them, as the log has it.

    Raises:
        ModelError: files are missing or damaged, or the log names others.
    """
    weights = read_checkpoint(path).weights
    if digest_tensors(weights) != digest:
        raise ModelError(f"{path}: its weights are not those the log names")
    return weights


def _damage(tensors: Tensors, recorded: Any) -> str:
    """Which tensors differ from their digests in the manifest, for an error message."""
    if not isinstance(recorded, dict):
        return f"they are not what {MANIFEST} names"
    found = _hashes({name: line_of(name, tensor) for name, tensor in tensors.items()})
    odd = sorted(name for name in found | recorded if found.get(name) != recorded.get(name))
    if not odd:
        return f"their types, shapes or {MANIFEST} itself changed"
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return f"{', '.join(odd[:3])}{more} (not what {MANIFEST} names)"


def _hashes(lines: dict[str, str]) -> dict[str, str]:
    """The hash of each tensor's bytes, from its line in a digest."""
    return {name: line.rsplit(" ", 1)[1] for name, line in lines.items()}


def holds_weights(name: str) -> bool:
    """Whether a file of a model directory holds weights or describes weight files, and is not copied."""
    return name == MANIFEST or name.endswith((".safetensors", ".bin", ".index.json"))


def _save_weights(
    weights: Tensors | Iterator[tuple[str, torch.Tensor]], building: Path, like: Path
) -> dict[str, str]:
    config = building / "config.json"
    if isinstance(weights, dict):
        _name_dtype(config, next(iter(weights.values())).dtype)
        return _save(weights, building / WEIGHTS)
    first = next(weights)
    dtype = first[1].dtype  # one type for all tensors, since config.json names one
    _name_dtype(config, dtype)
    kinds = {name: TensorKind(dtype, dims) for name, dims in weight_shapes(read_shape(like)).items()}
    return write_tensors(building / WEIGHTS, kinds, _again(first, weights))


def _again(
    first: tuple[str, torch.Tensor], rest: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield first
    yield from rest


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, str]:
    # The widest types first, so that each tensor lies at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return write_tensors(file, {name: kind_of(tensor) for name, tensor in ordered}, ordered)


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Make config.json name the type of the written weights, which may differ from the base model's."""
    values = orjson.loads(config.read_bytes())
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def _name_head(config: Path, scores: int) -> None:
    """Make config.json that of a model with a head of scores, as transformers writes it."""
    values = orjson.loads(config.read_bytes())
    values["architectures"] = [f"{_CLASSES[values['model_type']]}{SCORES}"]
    names = {str(i): name for i, name in enumerate(SCORE_LABELS[:scores])}
    values |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    config.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def _load(file: Path) -> Tensors:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return tensors


def _fsync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
