"""`rollbook keys`: makes keys, and shows what a file of keys holds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import orjson
from rich.table import Table

from rollbook.ingest.keys import checked_name, checked_role, digest_of, parsed, read_keys
from rollbook.store.errors import ConfigError
from rollbook.store.terminal import Console, json_for_terminal

MADE = "rollbook-"
"""What made keys begin with, so that a scanner for leaked secrets knows them."""


def add_key(file: Path, name: str, role: str, expires: datetime | None) -> str:
    """Make a key and add its hash to a file, which is made where there is none; the key, told this once.

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
    """One at a time adds to the files of a folder."""
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


def print_keys(file: Path, as_json: bool) -> None:
    """Print names, roles and expiry of the keys of a file.

    Raises:
        ConfigError: it cannot be used.
    """
    keys, _ = read_keys(file)
    now = datetime.now(UTC)
    if as_json:
        rows = [{"name": k.name, "role": k.role.value, "expires": k.expires} for k in keys]
        sys.stdout.write(json_for_terminal(orjson.dumps(rows, option=orjson.OPT_UTC_Z)) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "role", "expires"):
        table.add_column(column)
    for key in keys:
        until = "" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M} UTC"
        table.add_row(key.name, key.role.value, f"{until}, expired" if key.expired(now) else until)
    Console().print(table)
