"""A model's state in files: a folder named by the number of an operation, never by what a client sent.

It is an adapter of PEFT's form, with optimizer and gradients beside it where training goes on from it. In
`probe.json` is what the model with it makes of a fixed sequence (`weights.peft`): a server that samples with
the adapter is held to that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from rollbook.engines.model_files import PEFT_WEIGHTS
from rollbook.engines.weights.digests import Tensors
from rollbook.engines.weights.peft import Probe, write_probe
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import fsync_file, fsync_folder, place_inside
from rollbook.train.checkpoints.export import write_adapter
from rollbook.train.config.lora import LoraConfig
from rollbook.train.tenants.model import State

Probing = Callable[[], Probe]
"""Has the model with the factors make what it makes of the fixed sequence."""
OPTIMIZER, GRADIENTS = "optimizer.safetensors", "gradients.safetensors"


def write_factors(
    store: Path, run: str, number: int, factors: Tensors, probe: Probing, lora: LoraConfig, base: str
) -> str:
    """Write the factors behind an operation, durably; returns their folder, relative to the store's.

    Args:
        probe: computed while they are written.
        base: what the model beside them is called.
    """
    with _folder(store, run, number) as (building, name):
        _write_probed(building, factors, probe, lora, base)
    return name


def _write_probed(folder: Path, factors: Tensors, probe: Probing, lora: LoraConfig, base: str) -> None:
    with ThreadPoolExecutor(1) as disk:
        written = disk.submit(write_adapter, folder, factors, lora, base)
        write_probe(folder, probe())
        written.result()


def write_state(
    store: Path, run: str, number: int, state: State, probe: Probing | None, lora: LoraConfig, base: str
) -> str:
    """Write the state behind an operation, durably; as `write_factors`.

    Args:
        probe: None where nobody samples with it.
    """
    with _folder(store, run, number) as (building, name):
        if probe is None:
            write_adapter(building, state.adapter, lora, base)
        else:
            _write_probed(building, state.adapter, probe, lora, base)
        for file, tensors in ((OPTIMIZER, state.optimizer), (GRADIENTS, state.gradients)):
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, building / file)
            fsync_file(building / file)
    return name


@contextmanager
def _folder(store: Path, run: str, number: int) -> Iterator[tuple[Path, str]]:
    """Context: (a new folder to write to, what it is called in the store once it is whole). What an
    interrupted write left is replaced."""
    name = f"checkpoints/{run}/operation-{number:08d}"
    folder = place_inside(store, name)
    building = folder.with_name(f"{folder.name}.creating")
    shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(building)
    yield building, name
    fsync_folder(building)
    os.rename(building, folder)
    fsync_folder(folder.parent)


def read_state(store: Path, name: str, digests: Json) -> State:
    """The state in a folder.

    Raises:
        ReplayError: it is not whole, or another than its digests say.
    """
    folder = place_inside(store, name)
    try:
        state = State(*(load_file(folder / file) for file in (PEFT_WEIGHTS, OPTIMIZER, GRADIENTS)))
    except Exception as error:  # safetensors has no base of its own errors
        raise ReplayError(f"{folder} cannot be read: {error}; restore it from a copy") from error
    own = state.digests()
    if odd := [part for part, digest in digests.items() if part in own and own[part] != digest]:
        raise ReplayError(f"{folder}: {odd[0]} is another than what was written; restore it from a copy")
    return state
