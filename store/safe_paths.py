"""Opens what is in a store's folder, and nothing else: a store from a stranger leads nowhere outside.

A store holds folders and plain files. A link in it could name any file of the user who opens it,
to be read, truncated or overwritten; opening a pipe or a device in place of a file could block
forever. So:

- `look_inside` checks every name in the folder when a store is opened, before anything else is
  read, and refuses the store if one is neither a folder nor a plain file. A link into a folder
  that `ROLLBOOK_ALLOW` names may stay.
- Files that this code opens (`open_plain`, `read_small`) are opened without following a link in
  the last part of their path, never block, and are refused if they are no plain files or larger
  than such a file ever is.
- A path that the log or a manifest names is taken as relative to the store's folder, or refused
  (`place_inside`).

What remains: Arrow, DuckDB and SQLite open files by their path. A process that can write into
the folder *while* it is read could put a link there after the check; only the owner of a store's
folder should be able to write to it.

Also here: `fsync_folder` waits until a change of a folder is on the disk, and a lock keeps a
folder from being removed while it is read.

Readers share the lock, removal takes it exclusively. It (`flock`) ends with the process; a file
system without such locks holds nothing, and a reader may find files gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rollbook.store.errors import OutsideError
from rollbook.store.external_access import allows_folder, remedy

OURS = (
    *("lanes", "sealed", "derived", "leases", "claims", "checkpoints", "idle", "service", "tensorboard"),
    "iceberg",
)
"""Folders of a store that are looked through. What else lies beside them is looked at, but not into."""
SMALL = 1 << 20
"""Bytes beyond which a small file (a marker, settings, a note) is none of ours."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def look_inside(store: Path) -> None:
    """Check that the store's folder holds only folders and plain files.

    Raises:
        OutsideError: something else is there; nothing was opened.
    """
    for entry in _entries(str(store)):
        if entry.is_dir() and entry.name in OURS:
            _look_through(entry.path)


def _look_through(folder: str) -> None:
    waiting = [folder]
    while waiting:
        waiting += [entry.path for entry in _entries(waiting.pop()) if entry.is_dir()]


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder, each checked; none if the folder has gone meanwhile."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # who may not list a folder finds nothing to open in it
    for entry in entries:
        if entry.is_symlink():
            _refuse_link(entry.path)
        elif not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            _refuse_special(entry.path)
        yield entry


def _refuse_link(path: str) -> None:
    try:
        target = os.readlink(path)
    except OSError:
        return  # it went meanwhile
    real = os.path.realpath(path)
    if not allows_folder(real):
        raise OutsideError(
            f"{path} is a link to {target}, and no link is followed out of a store: remove it; or "
            + remedy(real)
        )


def _refuse_special(path: str) -> None:
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if kind in _KINDS:
        raise OutsideError(
            f"{path} is {_KINDS[kind]}, and a store holds folders and plain files only: remove it"
        )


def open_plain(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """A descriptor of a plain file; like `os.open`, but a link is not followed and a pipe not waited for.

    Raises:
        OutsideError: it is a link, a device, a pipe or a folder; nothing was read or written.
        OSError: as `os.open`.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if not _is_plain(path):
            raise _not_plain(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain(path)
    return fd


def refuse_no_plain(path: str | os.PathLike[str]) -> None:
    """Check that a plain file is there, or nothing: for files that a library will open by their path.

    Raises:
        OutsideError: something else is there.
    """
    if not _is_plain(path):
        raise _not_plain(path)


def _is_plain(path: str | os.PathLike[str]) -> bool:
    """Whether a plain file is there, or nothing."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return True


def _not_plain(path: str | os.PathLike[str]) -> OutsideError:
    return OutsideError(f"{os.fspath(path)} is no plain file, where a store has one: remove it")


def read_small(path: str | os.PathLike[str], most: int = SMALL) -> bytes:
    """The content of a plain file of at most so many bytes.

    Raises:
        OutsideError: it is no plain file, or larger.
        FileNotFoundError, OSError: as `os.open`.
    """
    fd = open_plain(path, os.O_RDONLY)
    with open(fd, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OutsideError(
            f"{os.fspath(path)} has more than {most:,} bytes, which no such file of a store has"
        )
    return data


def place_inside(store: Path, named: str) -> Path:
    """The path in the store's folder that an event or a manifest names, such as a checkpoint's.

    Raises:
        OutsideError: it is absolute, climbs out of the folder, or passes through a link.
    """
    parts = PurePosixPath(named).parts
    if not parts or named.startswith("/") or ".." in parts or "\0" in named:
        raise OutsideError(f"the log names the path {named!r}, which is not in the store {store}: not opened")
    path = store
    for part in parts:
        path = path / part
        if path.is_symlink():
            _refuse_link(str(path))
    return path


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (created, renamed, removed files) durable."""
    fsync_file(folder, os.O_DIRECTORY)


def fsync_file(path: Path, flags: int = 0) -> None:
    """Make a file's content durable."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Context: the folder is not removed within it. A missing folder is not created."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # what is missing, or no folder, is said by whoever reads it
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def removing_alone(folder: Path) -> Iterator[bool]:
    """Context: gives whether nobody reads the folder; within it nobody can begin to.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        alone = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        except OSError:
            pass  # there are no locks here
        yield alone
    finally:
        os.close(fd)
