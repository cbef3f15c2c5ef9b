"""Who may read a store's files: only their owner, unless `store.toml` shares them.

Every file and folder of a store is created through this module, so that its mode does not depend
on the umask. Existing files keep their modes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rollbook.store.errors import ConfigError
from rollbook.store.safe_paths import open_plain
from rollbook.store.settings import read_settings

_ROOTS = ("STORE.json", "store.toml")
"""Files that only a store's own folder holds."""


@dataclass(frozen=True, slots=True)
class Modes:
    """Of new files and folders."""

    file: int
    folder: int


MODES = {
    "nobody": Modes(0o600, 0o700),
    # The setgid bit: new entries belong to the folder's group.
    "group": Modes(0o660, 0o2770),
    "all": Modes(0o664, 0o2775),
}
"""By `[files] share`. Who reads writes too: locks, leases."""


def modes_of(path: Path) -> Modes:
    """The modes of what is new at or below this path, by the settings of the store that it is in."""
    path = Path(os.path.abspath(path))
    for folder in (path, *path.parents):
        if any((folder / name).exists() for name in _ROOTS):
            try:
                stat = (folder / "store.toml").stat()
            except OSError:
                break
            return _read(folder, stat.st_mtime_ns, stat.st_ino)
    return MODES["nobody"]


@lru_cache(maxsize=256)
def _read(folder: Path, _mtime_ns: int, _inode: int) -> Modes:
    try:
        return MODES[read_settings(folder).files.share]
    except ConfigError:
        return MODES["nobody"]  # opening the store raises it; until then only the owner may read


def open_file(path: str | Path, flags: int) -> int:
    """A descriptor, as of `os.open`; where O_CREAT makes the file, it has the store's mode.

    Raises:
        OutsideError: a link, a pipe or the like is there; nothing was read or written.
    """
    if not flags & os.O_CREAT:
        return open_plain(path, flags)
    if not flags & os.O_EXCL:
        with contextlib.suppress(FileNotFoundError):
            return open_plain(path, flags & ~os.O_CREAT)
    mode = modes_of(Path(path).parent).file
    try:
        fd = open_plain(path, flags | os.O_EXCL, mode)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return open_plain(path, flags & ~os.O_CREAT)  # made meanwhile
    try:
        _set(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_empty(path: Path) -> Path:
    """The path, where there is now a file with the store's mode: for libraries that open files by name."""
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    return path


def replace_small(path: Path, data: bytes) -> None:
    """Replace a small file by a new one; the old one is not written into."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a folder with the store's mode, and those above it that are missing; one that is there stays.

    Raises:
        FileExistsError: a file is there.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    modes = modes_of(path)
    try:
        os.mkdir(path, modes.folder & 0o777)
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # made meanwhile
    if path.stat().st_mode & 0o7777 != modes.folder:
        path.chmod(modes.folder)


def _set(fd: int, mode: int) -> None:
    """Set the mode bits that the umask removed."""
    if os.fstat(fd).st_mode & 0o7777 != mode:
        os.fchmod(fd, mode)
