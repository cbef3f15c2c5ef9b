"""Checkpoints: Hugging Face directories in the store, with the optimizer's state beside the weights.

A directory is written under another name, made durable and renamed, so one that is there is whole.
Its `rollbook.json` names the digests of what it holds; loading checks them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollbook.ingest.engines.weights import Tensors, digest_tensors, read_weights
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten
from rollbook.store.ids import new_id
from rollbook.store.lane.files import fsync_folder

MANIFEST = "rollbook.json"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a checkpoint holds. `optimizer` is None where only weights were written."""

    weights: Tensors
    optimizer: Tensors | None


def checkpoint_name(run: str, policy: str, version: int) -> Path:
    """Where a version's checkpoint lies, relative to the store."""
    return Path("checkpoints") / run / policy / f"v{version:08d}"


def write_checkpoint(
    store: Path,
    run: str,
    policy: str,
    version: int,
    weights: Tensors,
    optimizer: Tensors | None,
    *,
    like: Path,
    phase: str | None,
) -> CheckpointWritten:
    """Write a checkpoint durably; the event that says so.

    Args:
        like: a model directory whose other files (config, tokenizer, template) go along.
    """
    name = checkpoint_name(run, policy, version)
    if (store / name).exists():  # an earlier attempt at this version, kept as it is
        name = name.with_name(f"{name.name}-{new_id()[-8:]}")
    target = store / name
    building = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and file.name != MANIFEST:
            shutil.copy2(file, building / file.name)
    _name_dtype(building / "config.json", weights)
    _save(weights, building / "model.safetensors")
    if optimizer is not None:
        _save(optimizer, building / OPTIMIZER)
    record = CheckpointWritten(
        policy=policy,
        policy_version=version,
        path=str(name),
        weights_digest=digest_tensors(weights),
        optimizer_digest=None if optimizer is None else digest_tensors(optimizer),
        phase=phase,
        bytes=sum(file.stat().st_size for file in building.iterdir()),
    )
    manifest = {
        "run": run,
        "policy": policy,
        "policy_version": version,
        "weights_digest": record.weights_digest,
        "optimizer_digest": record.optimizer_digest,
    }
    (building / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    _make_durable(building, target)
    return record


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
        manifest = orjson.loads(file.read_bytes())
        digests = {what: manifest[f"{what}_digest"] for what in ("weights", "optimizer")}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from error
    weights = read_weights(path)
    optimizer: Tensors | None = None
    if digests["optimizer"] is not None:
        optimizer = _load(path / OPTIMIZER)
    for (what, expected), tensors in zip(digests.items(), (weights, optimizer), strict=True):
        if tensors is not None and digest_tensors(tensors) != expected:
            raise ModelError(f"{path}: the {what} are damaged (they are not what {MANIFEST} names)")
    return Checkpoint(weights, optimizer)


def _name_dtype(config: Path, weights: Tensors) -> None:
    """Have config.json name the type of the weights beside it, whatever the base model's was."""
    values = orjson.loads(config.read_bytes())
    values.pop("torch_dtype", None)
    values["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def _save(tensors: Tensors, file: Path) -> None:
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


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
