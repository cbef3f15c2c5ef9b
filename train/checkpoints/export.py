"""Exports a checkpoint as a directory for others: a model with configuration and tokenizer, or its
adapter alone, with its files as if only weights had been written.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

from rollbook.engines.model_files import MANIFEST, PEFT_CONFIG, PEFT_WEIGHTS, is_sharded, weight_files
from rollbook.engines.weights.digests import Tensors, line_of, stream_files
from rollbook.store import Store
from rollbook.store.digest import combine, is_tree
from rollbook.store.errors import InterchangeError, ModelError
from rollbook.store.events import CheckpointRemoved, CheckpointWritten, Event, Json
from rollbook.store.fold.checkpoints import held_and_removed, removal_message
from rollbook.store.interchange.destination import destination
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import fsync_file, reading
from rollbook.train.checkpoints.checkpoint import (
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    WEIGHTS,
    read_checkpoint,
    save_stream,
    save_weights,
    stream_checkpoint,
)
from rollbook.train.checkpoints.directory import (
    FILES,
    SHARDS,
    TENSORS,
    copy_along,
    holds_weights,
    manifest_in,
    manifest_of,
    size_of,
    write_manifest,
)
from rollbook.train.checkpoints.shards import kind_of, write_tensors
from rollbook.train.config.lora import LoraConfig


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An exported model: `checkpoint` is the folder it comes from, `to` where it is, of `bytes` in
    all. `weights_digest` is that of the version's weights; with an adapter its products are
    merged into them."""

    run: str
    policy: str
    policy_version: int
    weights_digest: str
    checkpoint: str
    to: str
    bytes: int


def export_model(log: Store, out: Path, version: int | None, run: str | None, policy: str) -> ExportedModel:
    """Copy a version's checkpoint to a new Hugging Face model directory, without what only training needs.

    Its weights are compared with the log's digest before they are copied, and again where they came to.

    Args:
        version: None: the newest that has a checkpoint.
        run: None: the only one that has checkpoints of the policy.

    Raises:
        InterchangeError: there is no such checkpoint, or `out` exists or cannot be written.
        ModelError: the checkpoint is damaged.
    """
    run, record = checkpoint_of(log, version, run, policy)
    source = log.folder(record.path)
    with destination(out, folder=True) as building, reading(source):
        _lines(source, stream_checkpoint(source), record)
        _copy(source, building)
        lines = _lines(building, stream_files(building), record)
        manifest = manifest_of(run, record, {"weights": lines})
        (building / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        size = size_of(building)
    what = (run, policy, record.policy_version, record.weights_digest)
    return ExportedModel(*what, record.path, str(out), size)


def write_model(out: Path, weights: Iterator[tuple[str, torch.Tensor]], like: Path) -> None:
    """Write weights as a new Hugging Face model directory, with the other files copied from `like`.

    Args:
        weights: of the model that `like` describes, in the order of `weight_names.plan`.

    Raises:
        InterchangeError: `out` exists or cannot be written.
        ModelError: they are another model's.
    """
    with destination(out, folder=True) as building:
        copy_along(like, building)
        save_weights(weights, building, like)


@contextlib.contextmanager
def model_directory(folder: Path) -> Iterator[Path]:
    """A directory from which libraries can load the model: the folder itself, or a temporary one
    for a sharded checkpoint."""
    if not is_sharded(folder):
        with reading(folder):
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rollbook-model-") as temporary:
        with reading(folder):
            _copy(folder, Path(temporary))
        yield Path(temporary)


def export_adapter(log: Store, out: Path, version: int | None, run: str | None, policy: str) -> ExportedModel:
    """Write a version's low-rank factors as a PEFT adapter, to be loaded beside the weights that
    they were trained with. Arguments as of `export_model`.

    Raises:
        InterchangeError: there is no such checkpoint, it has no factors, or `out` exists or
            cannot be written.
        ModelError: the checkpoint is damaged.
    """
    run, held = _of_run(_checkpoints(log, policy), run, policy)
    record = _of_version(log, held, version, run, policy)
    adapter = read_checkpoint(log.folder(record.path)).adapter
    if adapter is None:
        raise InterchangeError(
            f"version {record.policy_version} of policy {policy!r}, run {run!r}, has no adapter: it was "
            "trained without [lora]; `rollbook export model` writes its weights"
        )
    base = held.get(adapter.lora.base_version)
    beside = "" if base is None else str(log.folder(base.path))
    with destination(out, folder=True) as building:
        write_adapter(building, adapter.tensors, adapter.lora.config, beside)
        size = size_of(building)
    what = (run, policy, record.policy_version, record.weights_digest)
    return ExportedModel(*what, record.path, str(out), size)


def write_adapter(folder: Path, factors: Tensors, lora: LoraConfig, base: str) -> None:
    """Write factors into a folder as PEFT reads them, durably but for the folder itself.

    Args:
        base: as of `peft_config`.
    """
    write_tensors(folder / PEFT_WEIGHTS, {name: kind_of(f) for name, f in factors.items()}, factors.items())
    config = orjson.dumps(peft_config(lora, factors, base), option=orjson.OPT_INDENT_2)
    (folder / PEFT_CONFIG).write_bytes(config)
    fsync_file(folder / PEFT_CONFIG)


def peft_config(lora: LoraConfig, names: Iterable[str], base: str) -> Json:
    """The content of PEFT's `adapter_config.json`.

    Args:
        names: of the factors; base: model directory that the adapter goes with.
    """
    targets = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


_WRITTEN_OR_REMOVED = frozenset({CheckpointWritten.KIND, CheckpointRemoved.KIND})


def checkpoint_of(
    log: Store, version: int | None, run: str | None, policy: str, named_by: str = "--version"
) -> tuple[str, CheckpointWritten]:
    """(run, checkpoint) of a version that is in the store. Arguments as of `export_model`.

    Args:
        named_by: the option that names the version, for the message.

    Raises:
        InterchangeError: there is no such checkpoint.
    """
    run, held = _of_run(_checkpoints(log, policy), run, policy)
    return run, _of_version(log, held, version, run, policy, named_by)


_Found = dict[str, dict[int, CheckpointWritten]]
"""Run -> version -> its checkpoint."""


def _checkpoints(log: Store, policy: str) -> _Found:
    """The policy's checkpoints whose folders exist, or may on other hosts; the newest of a version that has
    several."""
    events: dict[str, list[Event]] = {}
    for event in log.events_of(_WRITTEN_OR_REMOVED):
        events.setdefault(event.run, []).append(event)
    checkpoints: _Found = {}
    for run, of_run in events.items():
        for record in held_and_removed(of_run)[0]:
            if record.policy == policy and log.may_have(record.path):
                checkpoints.setdefault(run, {})[record.policy_version] = record
    return checkpoints


def _of_run(checkpoints: _Found, run: str | None, policy: str) -> tuple[str, dict[int, CheckpointWritten]]:
    if run is None and len(checkpoints) == 1:
        return next(iter(checkpoints.items()))
    if run in checkpoints:
        return run, checkpoints[run]
    there = f"there are of: {_listed(sorted(checkpoints))}"
    if run is not None:
        raise InterchangeError(f"run {run!r} has no checkpoint of policy {policy!r}; {there}")
    if not checkpoints:
        raise InterchangeError(f"the store holds no checkpoint of policy {policy!r}: train first")
    raise InterchangeError(
        f"several runs have checkpoints of policy {policy!r}: name one with --run; {there}"
    )


def _of_version(
    log: Store,
    held: dict[int, CheckpointWritten],
    version: int | None,
    run: str,
    policy: str,
    named_by: str = "--version",
) -> CheckpointWritten:
    version = max(held) if version is None else version
    if version not in held:
        there = f"there are of: {_listed(sorted(held))}"
        raise InterchangeError(
            f"{named_by} {version}: run {run!r} has no checkpoint of it; {there}"
            f"{_why_gone(log, version, run, policy)}"
        )
    return held[version]


def _why_gone(log: Store, version: int, run: str, policy: str) -> str:
    """A sentence for the end of an error, if the version's checkpoint was removed."""
    of_run: list[Event] = [e for e in log.events_of(_WRITTEN_OR_REMOVED) if e.run == run]
    removed = [r for r in held_and_removed(of_run)[1] if (r.policy, r.policy_version) == (policy, version)]
    return f". {removal_message(removed[-1])}" if removed else ""


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"


def _lines(
    model: Path, weights: Iterator[tuple[str, torch.Tensor]], record: CheckpointWritten
) -> dict[str, str]:
    """The line of each tensor in the digest of the weights that the log has.

    Raises:
        ModelError: the weights have another digest.
    """
    tree = is_tree(record.weights_digest)
    lines = {name: line_of(name, tensor, tree=tree) for name, tensor in weights}
    if (digest := combine(lines.values(), tree=tree)) != record.weights_digest:
        raise ModelError(
            f"{model}: its weights are not those that the log names for version {record.policy_version} "
            f"(digest {digest[:16]}, in the log {record.weights_digest[:16]}): restore it from a copy, or "
            "name another --version"
        )
    return lines


def _copy(source: Path, building: Path) -> None:
    sharded = is_sharded(source)
    weights = set() if sharded else {file.name for file in weight_files(source)}
    for file in source.iterdir():
        if file.is_file() and (file.name in weights or not holds_weights(file.name)):
            shutil.copyfile(file, building / file.name)
    if sharded:
        save_stream(building / WEIGHTS, stream_checkpoint(source), source)


def without_optimizer(checkpoint: Path, files: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """The files, by name, without the optimizer's state: the policy's, and the critic's where there
    is one.

    Args:
        files: of the checkpoint, by name.
        scratch: a new folder, for the manifest that names what is left.

    Raises:
        ModelError: the checkpoint is sharded: each shard holds some of the optimizer's state.
    """
    manifest = manifest_in(checkpoint)
    if SHARDS in manifest:
        raise ModelError(
            f"{checkpoint} is of shards, which hold weights and the optimizer's state together: it goes as a "
            "whole"
        )
    for what in ("critic_optimizer", "optimizer"):
        manifest.pop(f"{what}_digest", None)
        manifest.pop(TENSORS[what], None)
    left = {name: path for name, path in files.items() if name not in (OPTIMIZER, CRITIC_OPTIMIZER)}
    if isinstance(manifest.get(FILES), dict):
        manifest[FILES] = {name: sha256 for name, sha256 in manifest[FILES].items() if name in left}
    make_folder(scratch)
    write_manifest(scratch, manifest | {"optimizer_digest": None, TENSORS["optimizer"]: {}})
    return left | {MANIFEST: scratch / MANIFEST}
