"""A checkpoint's directory: its name, its manifest, and its files other than tensors.

It is built in a temporary folder, which is made durable and renamed once it is complete, and
removed if it never will be.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import torch

from rollbook.engines.model_files import MANIFEST
from rollbook.store.digest import combine, is_tree
from rollbook.store.errors import ModelError, RankError, ShortageError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.ids import new_id
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.safe_paths import fsync_file, fsync_folder, place_inside, read_small
from rollbook.store.sealed.parquet import sha256_of
from rollbook.train.model.shape import SCORE_LABELS, SCORES

MANIFEST_BYTES = 64 << 20
"""Largest size of the manifest, which has one line per tensor, or per piece of one."""
LORA = "lora"
"""The manifest's key of the training of low-rank factors."""
SHARDS = "shards"
"""The manifest's key of the files that ranks wrote, and of the pieces in each."""
STATES = ("optimizer", "critic_optimizer")
"""What is digested by blocks in every run. Weights and factors are where those of its first version are."""
FILES = "files"
"""The manifest's key of the sha256 of each file beside it, of a checkpoint that training can resume from."""
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
    """A free path for a checkpoint: another one if an earlier attempt at its version, which is
    kept, has the name."""
    return name.with_name(f"{name.name}-{new_id()[-8:]}") if (store / name).exists() else name


def manifest_of(run: str, record: CheckpointWritten, lines: Mapping[str, dict[str, str]]) -> Json:
    """The content of `rollbook.json`: digests of everything the checkpoint holds, together and by
    tensor."""
    manifest: Json = {"run": run, "policy": record.policy, "policy_version": record.policy_version}
    manifest |= {"optimizer_digest": None, TENSORS["optimizer"]: {}}
    tree = is_tree(record.weights_digest)
    for what, of_tensors in lines.items():
        digest = combine(of_tensors.values(), tree=tree or what in STATES)
        manifest |= {f"{what}_digest": digest, TENSORS[what]: hashes(of_tensors)}
    return manifest


def hashes(lines: Mapping[str, str]) -> dict[str, str]:
    """The hash of each tensor's bytes, from its line in a digest."""
    return {name: line.rsplit(" ", 1)[1] for name, line in lines.items()}


def write_manifest(building: Path, manifest: Json, known: dict[str, str] | None = None) -> None:
    """Write `rollbook.json`.

    Args:
        known: the sha256 (hex) of files that need not be read for it; with it, the manifest has those of all.
    """
    if known is not None:
        there = (file.name for file in building.iterdir())
        names = sorted(name for name in there if name not in known and name != MANIFEST)
        with ThreadPoolExecutor(2) as pool:
            read = dict(zip(names, pool.map(lambda name: sha256_of(building / name), names), strict=True))
        manifest = manifest | {FILES: read | known}
    make_empty(building / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def changed_files(folder: Path) -> list[str]:
    """The files of a checkpoint that have another sha256 than its manifest says, or are not there.

    Raises:
        ModelError: the manifest cannot be read.
        OutsideError: it names a file that is not beside it.
    """
    recorded = manifest_in(folder).get(FILES)
    if not isinstance(recorded, dict):  # of an earlier release, or of weights alone
        return []
    files = {name: place_inside(folder, name) for name in recorded}
    return sorted(n for n, file in files.items() if not file.is_file() or sha256_of(file) != recorded[n])


def manifest_in(path: Path) -> Json:
    """The content of the manifest in a checkpoint's directory.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    file = path / MANIFEST
    if not file.exists():
        raise ModelError(f"{path}: holds no {MANIFEST}, so it is no checkpoint")
    try:
        manifest = orjson.loads(read_small(file, MANIFEST_BYTES))
    except ValueError as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from error
    if not isinstance(manifest, dict):
        raise ModelError(f"{file}: cannot be read: it is no JSON object")
    return manifest


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
    """Give a finished folder its name, once every byte of it is on disk."""
    for file in building.iterdir():
        fsync_file(file)
    fsync_folder(building)
    building.rename(target)
    fsync_folder(target.parent)


_NAME = re.compile(r"\.v\d{8}(?:-[0-9a-f]{8})?\.(\d+)")
"""Name of a folder that is being built; it contains the process id."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def building_beside(target: Path) -> Iterator[Path]:
    """A new folder beside the target, locked while it is built, and removed if that fails.

    Raises:
        ShortageError: the disk is full.
    """
    building = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)  # left by an earlier process with the same process id
    try:
        make_folder(building)
        lock = os.open(building, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield building
        finally:
            os.close(lock)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        cause = error.__cause__ if isinstance(error, RankError) else error
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise ShortageError(_full(target)) from error
        raise


def _full(target: Path) -> str:
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    disk = folder
    while not os.path.ismount(disk):
        disk = disk.parent
    free = shutil.disk_usage(folder).free / 2**20
    return (
        f"the disk at {disk} has no room for the checkpoint {target} ({free:.1f} MiB are free): nothing of "
        "it was kept. No step is lost: make room there, and the same command goes on"
    )


def remove_left_over(folder: Path) -> list[Path]:
    """Remove unfinished checkpoints of ended processes from a policy's folder; returns what was removed."""
    left = [path for path in folder.glob(".v*") if _NAME.fullmatch(path.name) and _is_left(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def _is_left(building: Path) -> bool:
    """Whether a folder is abandoned: the process that built it ended, and none on any machine locks
    it."""
    match = _NAME.fullmatch(building.name)
    assert match is not None
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        pass
    except PermissionError:
        return False
    else:
        return False
    try:
        lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
