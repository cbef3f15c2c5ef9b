"""A checkpoint's directory: its name, its manifest, what it has beside tensors, how it is made durable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch

from rollbook.ingest.engines.model_files import MANIFEST
from rollbook.store.digest import combine
from rollbook.store.durable import fsync_folder
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.ids import new_id
from rollbook.store.inside import read_small
from rollbook.store.permissions import make_empty
from rollbook.train.megatron.shape import SCORE_LABELS, SCORES

MANIFEST_BYTES = 64 << 20
"""Largest size of the manifest, which has one line per tensor, or per piece of one."""
LORA = "lora"
"""The manifest's key of the training of low-rank factors."""
SHARDS = "shards"
"""The manifest's key of the files that ranks wrote, and of the pieces in each."""
TENSORS = {
    "weights": "tensors",
    "optimizer": "optimizer_tensors",
    "critic": "critic_tensors",
    "critic_optimizer": "critic_optimizer_tensors",
    "adapter": "adapter_tensors",
}
"""The manifest's keys of the digests by tensor, by what a checkpoint may hold."""
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3_text": "Gemma3Text",
    "gpt_oss": "GptOss",
}
"""How transformers calls the classes of each family."""


def checkpoint_name(run: str, policy: str, version: int) -> Path:
    """Path of a version's checkpoint, relative to the store."""
    return Path("checkpoints") / run / policy / f"v{version:08d}"


def free_name(store: Path, name: Path) -> Path:
    """A checkpoint's path; another one, where an earlier attempt at its version is, which is kept."""
    return name.with_name(f"{name.name}-{new_id()[-8:]}") if (store / name).exists() else name


def manifest_of(run: str, record: CheckpointWritten, lines: Mapping[str, dict[str, str]]) -> Json:
    """What `rollbook.json` says: the digest of all that is held, together and by tensor."""
    said: Json = {"run": run, "policy": record.policy, "policy_version": record.policy_version}
    said |= {"optimizer_digest": None, TENSORS["optimizer"]: {}}
    for what, of_tensors in lines.items():
        said |= {f"{what}_digest": combine(of_tensors.values()), TENSORS[what]: hashes(of_tensors)}
    return said


def hashes(lines: Mapping[str, str]) -> dict[str, str]:
    """The hash of each tensor's bytes, from its line in a digest."""
    return {name: line.rsplit(" ", 1)[1] for name, line in lines.items()}


def write_manifest(building: Path, said: Json) -> None:
    """Write `rollbook.json`."""
    make_empty(building / MANIFEST).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2))


def manifest_in(path: Path) -> Json:
    """What the manifest of a checkpoint's directory says.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    file = path / MANIFEST
    if not file.exists():
        raise ModelError(f"{path}: holds no {MANIFEST}, so it is no checkpoint")
    try:
        said = orjson.loads(read_small(file, MANIFEST_BYTES))
    except ValueError as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from error
    if not isinstance(said, dict):
        raise ModelError(f"{file}: cannot be read: it is no JSON object")
    return said


def copy_along(like: Path, building: Path) -> None:
    """Copy the files of a model directory that are not weights."""
    for file in like.iterdir():
        if file.is_file() and not holds_weights(file.name):
            shutil.copyfile(file, make_empty(building / file.name))


def holds_weights(name: str) -> bool:
    """Whether a file of a model directory holds weights or describes weight files, and is not copied."""
    return name == MANIFEST or name.endswith((".safetensors", ".bin", ".index.json"))


def name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Make config.json name the type of the written weights, which may differ from the base model's."""
    values = orjson.loads(config.read_bytes())
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def name_head(config: Path, scores: int) -> None:
    """Make config.json that of a model with a head of scores, as transformers writes it."""
    values = orjson.loads(config.read_bytes())
    values["architectures"] = [f"{_CLASSES[values['model_type']]}{SCORES}"]
    names = {str(i): name for i, name in enumerate(SCORE_LABELS[:scores])}
    values |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    config.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def size_of(building: Path) -> int:
    """Bytes of a directory's files."""
    return sum(file.stat().st_size for file in building.iterdir())


def make_durable(building: Path, target: Path) -> None:
    """Give a finished folder its name, every byte of it on disk first."""
    for file in building.iterdir():
        _fsync(file)
    fsync_folder(building)
    building.rename(target)
    fsync_folder(target.parent)


def _fsync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
