"""A checkpoint's files as if only weights had been written: for whoever needs no more, as of a reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollbook.ingest.engines.model_files import MANIFEST
from rollbook.store.errors import ModelError
from rollbook.store.permissions import make_folder
from rollbook.train.checkpoints.checkpoint import CRITIC_OPTIMIZER, OPTIMIZER
from rollbook.train.checkpoints.directory import SHARDS, TENSORS, manifest_in, write_manifest


def without_optimizer(checkpoint: Path, files: Mapping[str, Path], made: Path) -> dict[str, Path]:
    """The files, by name, without the optimizer's state: the policy's, and the critic's where there is one.

    Args:
        files: of the checkpoint, by name.
        made: a new folder, for the manifest that names what is left.

    Raises:
        ModelError: it is of shards, each of which holds some of the optimizer's state.
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
    make_folder(made)
    write_manifest(made, manifest | {"optimizer_digest": None, TENSORS["optimizer"]: {}})
    left = {name: path for name, path in files.items() if name not in (OPTIMIZER, CRITIC_OPTIMIZER)}
    return left | {MANIFEST: made / MANIFEST}
