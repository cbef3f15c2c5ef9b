"""Models by their names at Hugging Face's hub: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

Files in the local cache are used from there, so that a start needs no network and gets the same
revision as the previous start; only missing files are fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rollbook.engines.model_files import weight_files
from rollbook.store.errors import ModelError
from rollbook.store.events import Json

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_SMALL = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
_BRANCH = "main"
ANSWER_S = 10.0
"""Longest wait for the hub's first answer."""


def model_folder(model: Path, *, weights: bool = True, fetch: bool = True) -> Path:
    """The directory of a model: the one named, or the snapshot of a model of that name at the hub.

    A name that is neither is returned unchanged: the reader's error says what is missing.

    Args:
        weights: they are needed; otherwise the tokenizer and the configuration are.
        fetch: missing files; otherwise the name is returned, for a program that fetches them
            itself.

    Raises:
        ModelError: it is the name of a model that is not in the local cache and cannot be
            fetched.
    """
    named = _NAME.fullmatch(str(model))
    if named is None or model.exists() or model.parent.is_dir():
        return model
    name, revision = named["name"], named["revision"] or _BRANCH
    cache = cache_folder(os.environ)
    held = _cached(cache, name, revision)
    if held is not None and _whole(held, weights=weights):
        return held
    if not fetch:
        return model
    # Of a branch the commit that the cache has, so that files of one snapshot are of one commit.
    try:
        return _fetched(cache, name, revision if held is None else held.name, weights=weights)
    except ModelError:
        if held is None or not weights or not _has_weights(held):
            raise
        return held  # a training needs no tokenizer, and who does says that it is not there


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where the hub's own tools keep models on this machine."""
    if own := environment.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def name_at_hub(folder: Path) -> str | None:
    """`OWNER/NAME@COMMIT` of a snapshot in the cache; None of any other folder."""
    at = folder.absolute()
    match = _SNAPSHOT.fullmatch(at.parent.parent.name)
    return f"{match['owner']}/{match['name']}@{at.name}" if match and at.parent.name == "snapshots" else None


def hub_reference(folder: Path) -> Json:
    """Fields for `run.opened`: the model's name at the hub and its commit, if it is a snapshot of one."""
    name = name_at_hub(folder)
    return {} if name is None else {"model_at_hub": name}


def _cached(cache: Path, name: str, revision: str) -> Path | None:
    """The snapshot of a branch, a tag or a commit, if the cache has one."""
    home = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (home / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    folder = home / "snapshots" / commit
    return folder if folder.is_dir() else None


def _whole(folder: Path, *, weights: bool) -> bool:
    """Whether a snapshot has the needed files: it may have been fetched in part."""
    small = all((folder / name).exists() for name in ("config.json", "tokenizer.json"))
    return small and (not weights or _has_weights(folder))


def _has_weights(folder: Path) -> bool:
    try:
        return (folder / "config.json").exists() and bool(weight_files(folder))
    except ModelError:  # the index names a file that was not fetched
        return False


def _fetched(cache: Path, name: str, revision: str, *, weights: bool) -> Path:
    """The snapshot, with what it lacked.

    Raises:
        ModelError: it cannot be had.
    """
    from huggingface_hub import HfApi, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        # Is there a hub, and the model in it? A download tries for long, and then takes what is there.
        HfApi(endpoint).model_info(name, revision=revision, timeout=ANSWER_S)
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=[*_SMALL, *(_WEIGHTS if weights else [])],
            ignore_patterns=["*/*"],
            endpoint=endpoint,
        )
    except Exception as error:  # of the network, of the hub, of the disk
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"revision {revision} of it{' with its weights' if weights else ''}"
        raise ModelError(
            f"the model {name}: there is no such folder, the cache {cache} has no {what}, and it cannot be "
            f"fetched: {why}. Name a model directory instead; or run `hf download {name}` where there is a "
            "network, and copy its cache here (HF_HOME names the place)"
        ) from error
    return Path(str(folder))
