"""Digests of the sources that a step runs, since a version does not show that a file was edited."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import xxhash

from rollbook.store.digest import combine

ROOMS: Mapping[str, tuple[str, ...]] = {
    "algorithms": ("train/algorithms",),
    "checkpoints": ("train/checkpoints",),
    "config": ("train/config",),
    "data": ("train/select", "train/batches", "train/sources"),
    "loop": (
        "train/step",
        "train/tenants",
        "train/loop",
        "train/resume",
        "train/publish",
        "train/environment.py",
        "train/source_files.py",
    ),
    "megatron": ("train/model", "train/ranks", "train/interface.py"),
    "events": ("store/events",),
    "fold": ("store/fold",),
    "digests": ("store/digest.py", "engines/weights"),
}
"""Name in a fingerprint -> the files and folders of Rollbook whose sources it is the digest of.

How the log is read is no part of it: what is read is checked against its own checksums.
"""
MEGATRON = "megatron-core"
"""The one package whose files are read as well: it is Python, which is edited where it is installed. What
others compute is compiled, and named by their versions."""
_HERE = Path(__file__).parents[1]
"""The package `rollbook`."""

_DIGITS = 16


@functools.cache
def file_digests() -> dict[str, dict[str, str]]:
    """Room -> file -> digest, of Rollbook's own files, as they were when this process first asked.

    Some 6 kB, which a training records once, as it starts; its steps record `source_digests`.
    """
    return {
        room: {
            name: digest
            for place in places
            for name, digest in _files(_HERE / place, len(places) > 1).items()
        }
        for room, places in ROOMS.items()
    }


@functools.cache
def source_digests() -> dict[str, str]:
    """Room -> digest of its sources, as they were when this process first asked; Megatron is one room."""
    digests = {room: _combined(files) for room, files in file_digests().items()}
    spec = importlib.util.find_spec("megatron.core")
    if spec is not None and spec.origin is not None:
        digests[MEGATRON] = _combined(_files(Path(spec.origin).parent, False))
    return digests


def _files(place: Path, named: bool) -> dict[str, str]:
    """Path within a folder -> digest, of each Python file in it and in its subfolders; or of a
    single file.

    Args:
        named: whether the paths begin with the folder's own name, for a room of several folders.
    """
    paths = [place] if place.is_file() else place.rglob("*.py")
    folder = place.parent if named or place.is_file() else place
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths}


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())[:_DIGITS]


def _combined(files: Mapping[str, str]) -> str:
    """The digest of a set of files: equal digests mean the same names and contents."""
    return combine(f"{name} {digest}" for name, digest in files.items())[:_DIGITS]
