"""STORE.json marks a folder as a store, and names the newest format of its files.

A store of an older format opens as it is. Before this release writes anything into it that an older one
would not understand, the marker is raised, durably: so an older release refuses the store by its marker,
and never meets a frame that it would take for damage.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from rollbook.store.errors import ConfigError, FormatError, NotAStoreError
from rollbook.store.ids import new_id, now_us
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.safe_paths import fsync_folder, read_small

MARKER = "STORE.json"
FORMAT_VERSION = 1
"""The newest format of frames and sealed units; `docs/format.md` draws every byte."""
_UNFINISHED = ".creating"
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,35}")


def read_marker(folder: Path) -> str:
    """Id of the store in this folder.

    Raises:
        NotAStoreError: no store is there.
        FormatError: a newer Rollbook wrote it.
    """
    return str(_read(folder)["id"])


def raise_marker(folder: Path) -> None:
    """Raise the marker to this release's format, durably, before any file of that format is written.

    Raises:
        NotAStoreError: there is no store.
        FormatError: a newer Rollbook has written here meanwhile.
    """
    meta = _read(folder)
    if meta["format"] != FORMAT_VERSION:
        temporary = _write(folder, meta | {"format": FORMAT_VERSION})
        temporary.rename(folder / MARKER)
        fsync_folder(folder)


def create_marker(folder: Path) -> None:
    """Make an empty store. Two processes may do so at once: the marker of one of them stays.

    Raises:
        NotAStoreError: the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file, not a folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    strangers = [f for f in folder.iterdir() if f.name not in ("lanes", "store.toml", MARKER)]
    if any(f for f in strangers if f.suffix != _UNFINISHED):
        raise NotAStoreError(f"{folder} exists and is not a Rollbook store: name an empty or a new folder")
    make_folder(folder / "lanes")
    temporary = _write(folder, _new(new_id()))
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / MARKER)
    temporary.unlink()
    fsync_folder(folder)


def new_place(folder: Path) -> Path:
    """The folder, absolute, once it is clear that a store can be made there.

    Raises:
        NotAStoreError: something is in it.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotAStoreError(f"{folder} exists and is not empty: name an empty or a new folder")
    return folder


@contextlib.contextmanager
def made_whole(folder: Path, marker: bytes) -> Iterator[Path]:
    """Context: a folder beside it with the marker of another store, which takes its place at the end; nothing
    is left of it where that fails.

    Raises:
        NotAStoreError, FormatError: as `read_marker`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{new_id()}")
    try:
        make_folder(temporary / "lanes")
        make_empty(temporary / MARKER).write_bytes(marker)
        read_marker(temporary)
        yield temporary
        fsync_folder(temporary)
        temporary.rename(folder)  # in place of an empty folder, too
        fsync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def new_marker(store_id: str) -> bytes:
    """The content of the marker of a store that is new, and has this id.

    Raises:
        ConfigError: it can be none.
    """
    if not _ID.fullmatch(store_id):
        raise ConfigError(
            f"{store_id!r} can be no store's id: use at most 36 small letters, digits and -, as in rollouts-1"
        )
    return orjson.dumps(_new(store_id))


def _new(store_id: str) -> dict[str, Any]:
    return {"format": FORMAT_VERSION, "id": store_id, "created_us": now_us()}


def _read(folder: Path) -> dict[str, Any]:
    marker = folder / MARKER
    if not marker.exists():
        raise NotAStoreError(f"{folder} is not a Rollbook store (it holds no {MARKER})")
    try:
        meta = orjson.loads(read_small(marker))
        meta = meta | {"format": int(meta["format"]), "id": str(meta["id"])}
    except (ValueError, KeyError, TypeError) as error:
        raise NotAStoreError(f"{marker} is not a Rollbook store's: {error!r}") from error
    if meta["format"] > FORMAT_VERSION:
        raise FormatError(
            f"{folder} is in format {meta['format']}; this release reads up to {FORMAT_VERSION}: update "
            "rollbook"
        )
    return dict(meta)


def _write(folder: Path, meta: dict[str, Any]) -> Path:
    """A durable file with the marker's content, not yet under its name."""
    temporary = folder / f"{new_id()}{_UNFINISHED}"
    with make_empty(temporary).open("wb") as file:
        file.write(orjson.dumps(meta))
        file.flush()
        os.fsync(file.fileno())
    return temporary
