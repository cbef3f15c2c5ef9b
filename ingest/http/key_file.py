"""Makes keys, and keeps their hashes in a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rollbook.ingest.http.keys import checked_name, checked_role, digest_of, parsed, read_keys
from rollbook.store.errors import ConfigError

MADE = "rollbook-"
"""Prefix of keys made here, so that scanners for leaked secrets recognise them."""


def add_key(file: Path, name: str, role: str, expires: datetime | None) -> str:
    """Make a key and add its hash to a file, made where there is none; the key, shown this once.

    Raises:
        ConfigError: the name is taken or none, the role is none, or the file cannot be used; it is as before.
    """
    key = MADE + secrets.token_urlsafe(32)
    lines = [
        "[[key]]",
        f'name = "{checked_name(name, "--name")}"',
        f'role = "{checked_role(role, "--role").value}"',
        f'sha256 = "{digest_of(key)}"',
    ]
    lines += [f"expires = {expires:%Y-%m-%dT%H:%M:%SZ}"] if expires else []
    file = file.resolve()
    try:
        with _held(file.parent):
            text = ""
            if file.exists():
                read_keys(file)
                text = file.read_text()
            text += ("\n" if text and not text.endswith("\n") else "") + ("\n" if text else "")
            text += "\n".join(lines) + "\n"
            parsed(text, str(file))
            _replace(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    return key


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A lock: one process at a time changes a folder's files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(file: Path, text: str) -> None:
    """Put a file in another's place, whole and durable, with its mode and owner."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as made:
            made.write(text)
            if file.exists():
                before = file.stat()
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, before.st_uid, before.st_gid)
            made.flush()
            os.fsync(fd)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
