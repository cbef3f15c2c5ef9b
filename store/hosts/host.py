"""The name by which the other hosts of a store know this one, in the file HOST of the store's folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

from rollbook.store.errors import CorruptionError
from rollbook.store.permissions import make_empty
from rollbook.store.safe_paths import fsync_folder, read_small
from rollbook.store.wal.files import HOST

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
_MOST = 15
"""Letters of the machine's own name in it, so that a lane's name has room for both."""
_BYTES = 4
"""Of chance: a thousand containers may all have the same name, and of two hosts with one name in a store each
takes the other's lanes for its own. With two bytes seven pairs of a thousand would."""


def host_name(store: Path) -> str:
    """This host's name, which is made once: the machine's, and eight digits.

    Raises:
        CorruptionError: the file holds no name.
    """
    path = store / HOST
    if not path.exists():
        _make(path)
    name = read_small(path).decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise CorruptionError(f"{path}: {name!r} is no host's name: restore the file from a copy")
    return name


def _make(path: Path) -> None:
    machine = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:_MOST]
    temporary = path.with_name(f".{HOST}.{secrets.token_hex(4)}")
    with make_empty(temporary).open("w") as file:
        file.write(f"{machine or 'host'}-{secrets.token_hex(_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another process was first
        os.link(temporary, path)
    temporary.unlink()
    fsync_folder(path.parent)
