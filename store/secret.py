"""The secret of a store, from which keys and digests are derived: it is never uploaded, exported or
shown.

It is in the store's folder or, where others may read that folder, in the file that
ROLLBOOK_SECRET_FILE names.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from rollbook.store.errors import NotAStoreError
from rollbook.store.ids import new_id
from rollbook.store.permissions import open_file
from rollbook.store.safe_paths import fsync_folder, read_small

SECRET = "SECRET"
"""Its file in the store's folder; no part of the log."""
ELSEWHERE = "ROLLBOOK_SECRET_FILE"
"""Variable with the path of the file that holds it instead."""
SECRETS = "secrets"
"""The purpose of digests that stand in the place of secrets."""
_BYTES = 32


def store_secret(store: Path, purpose: str) -> bytes:
    """32 bytes for one purpose, constant as long as the store keeps its secret, which is made if missing.

    Secrets of two purposes are independent: each is the HMAC-SHA256 of the purpose's name under
    the store's secret.

    Raises:
        NotAStoreError: the file holds no secret, or may not be read or made; or there are two.
    """
    path = _place(store)
    try:
        try:
            secret = read_small(path)
        except FileNotFoundError:
            secret = _made(path)
    except OSError as error:
        if path == store / SECRET:
            raise
        text = f"{ELSEWHERE} names {path}, which this user cannot use as its secret: {error.strerror}"
        raise NotAStoreError(text) from error
    if len(secret) != _BYTES:
        text = (
            f"{path} holds {len(secret)} bytes, and a store's secret has {_BYTES}: restore it, or remove it"
        )
        raise NotAStoreError(text + " (keys of single trajectories and digests of secrets then change)")
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


def _place(store: Path) -> Path:
    ours, elsewhere = store / SECRET, os.environ.get(ELSEWHERE)
    if not elsewhere:
        return ours
    path = Path(os.path.realpath(elsewhere))  # the operator's own: Kubernetes shows secrets by links
    if ours.exists() and not (path.exists() and ours.samefile(path)):
        raise NotAStoreError(
            f"{ELSEWHERE} names {path}, but the store has a secret of its own, from which keys were made: "
            f"move it there (mv {ours} {path}), or unset {ELSEWHERE}"
        )
    return path


def _made(path: Path) -> bytes:
    """Create a secret, durably; if two processes create one at once, the first one's is returned."""
    temporary = path.with_name(f"{new_id()}.creating")
    fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.fchmod(fd, os.fstat(fd).st_mode & 0o660)  # private even in a store that everybody may read
        os.write(fd, secrets.token_bytes(_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    fsync_folder(path.parent)
    return read_small(path)
