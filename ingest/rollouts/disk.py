"""What a launch takes of the disk, which no kernel bounds by folder: it is measured, every few seconds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOOK_S = 2.0
"""Between two measurements; what is written meanwhile goes beyond the bound."""
_BLOCK = 512
"""Bytes of a block of `st_blocks`, whatever the file system's own are."""


def bytes_used(folder: Path) -> int:
    """What a folder takes of the disk, with all that is in it: a file of two names once, links as links."""
    seen: set[tuple[int, int]] = set()
    used = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # it is gone by now
                entry = os.lstat(os.path.join(root, name))
                place = (entry.st_dev, entry.st_ino)
                used += 0 if place in seen else entry.st_blocks * _BLOCK
                seen |= {place} if entry.st_nlink > 1 else set()
    return used
