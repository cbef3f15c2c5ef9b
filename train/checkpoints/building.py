"""The folder in which a checkpoint is built: renamed once it is complete, removed if it never will be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollbook.store.errors import RankError, ShortageError
from rollbook.store.permissions import make_folder

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
    """Whether no process builds it: its process has ended, and no process on any machine holds its lock."""
    found = _NAME.fullmatch(building.name)
    assert found is not None
    try:
        os.kill(int(found[1]), 0)
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
