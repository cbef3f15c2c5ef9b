"""Keeps a folder from being removed while it is read: who reads shares its lock, who removes has it alone.

The lock (`flock`) ends with the process. On a file system without such locks nothing is held, and a reader
may find files gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Context: the folder is not removed within it. One that is not there is not made."""
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
    """Context: whether nobody reads the folder, and nobody begins to within it.

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
