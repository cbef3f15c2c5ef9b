"""A model's state in files: a folder named by the number of an operation and the attempt at it, never by what
a client sent.

It is an adapter of PEFT's form, or a whole model of Hugging Face's, with optimizer and gradients beside it
where training goes on from it. In an adapter's `probe.json` is what the model with it makes of a fixed
sequence (`weights.peft`): a server that samples with the adapter is held to that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from rollbook.engines.model_files import PEFT_WEIGHTS
from rollbook.engines.weights.peft import write_probe
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json
from rollbook.store.ids import new_id
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import fsync_file, fsync_folder, place_inside
from rollbook.train.checkpoints.checkpoint import WEIGHTS as WEIGHTS_FILE
from rollbook.train.checkpoints.checkpoint import save_weights
from rollbook.train.checkpoints.directory import copy_along
from rollbook.train.checkpoints.export import write_adapter
from rollbook.train.tenants.base import Base
from rollbook.train.tenants.model import ClientModel, State
from rollbook.train.tenants.operations import FACTORS, GRADIENTS, OPTIMIZER, WHOLE

TO_GO_ON = (OPTIMIZER, GRADIENTS)
"""Parts of a state in files of their names, beside what is trained."""


def write_trained(store: Path, run: str, number: int, model: ClientModel, base: Base) -> str:
    """Write what a model trains as it is behind an operation, durably; returns the folder, relative to the
    store's."""
    with _folder(store, run, number) as (building, name):
        _write_trained(building, model, base, sampled=True)
    return name


def write_state(
    store: Path, run: str, number: int, model: ClientModel, base: Base, *, sampled: bool = True
) -> str:
    """Write the whole state behind an operation, durably; as `write_trained`.

    Args:
        sampled: whether something may sample with it.
    """
    with _folder(store, run, number) as (building, name):
        _write_trained(building, model, base, sampled)
        for part, tensors in model.state(*TO_GO_ON).parts.items():
            file = building / f"{part}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
            fsync_file(file)
    return name


def _write_trained(building: Path, model: ClientModel, base: Base, sampled: bool) -> None:
    tensors = model.state(model.trained).parts[model.trained]
    if model.lora is not None:
        with ThreadPoolExecutor(1) as disk:  # which takes as long as what is computed meanwhile
            written = disk.submit(write_adapter, building, tensors, model.lora, base.name)
            if sampled:
                write_probe(building, model.probe())
            written.result()
        return
    copy_along(base.folder, building)
    save_weights(tensors, building, base.folder)
    for file in building.iterdir():
        fsync_file(file)


@contextmanager
def _folder(store: Path, run: str, number: int) -> Iterator[tuple[Path, str]]:
    """Context: (a new folder to write to, what it is called in the store once it is whole). Another process
    may write the same state: each has a folder of its own."""
    name = f"checkpoints/{run}/operation-{number:08d}-{new_id()[-8:]}"
    folder = place_inside(store, name)
    building = folder.with_name(f"{folder.name}.creating")
    make_folder(building)
    yield building, name
    fsync_folder(building)
    os.rename(building, folder)
    fsync_folder(folder.parent)


def remove_attempts(store: Path, checkpoint: str, counts: bool) -> None:
    """Remove the folder of an attempt at an operation that has ended, or where it counts, those of others."""
    folder = place_inside(store, checkpoint)
    if not counts:
        shutil.rmtree(folder, ignore_errors=True)
        return
    operation = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{operation}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def read_state(store: Path, name: str, digests: Json) -> State:
    """The state in a folder.

    Raises:
        ReplayError: it is not whole, or another than its digests say.
    """
    folder = place_inside(store, name)
    files = {FACTORS: PEFT_WEIGHTS, WHOLE: WEIGHTS_FILE} | {part: f"{part}.safetensors" for part in TO_GO_ON}
    parts = (WHOLE if WHOLE in digests else FACTORS, *TO_GO_ON)
    try:
        state = State({part: load_file(folder / files[part]) for part in parts})
    except Exception as error:  # safetensors has no base of its own errors
        raise ReplayError(f"{folder} cannot be read: {error}; restore it from a copy") from error
    own = state.digests()
    if odd := [part for part, digest in digests.items() if part in own and own[part] != digest]:
        raise ReplayError(f"{folder}: {odd[0]} is another than what was written; restore it from a copy")
    return state
