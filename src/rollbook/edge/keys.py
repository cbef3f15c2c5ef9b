"""API keys: names, roles and hashes, from a file that is read again as it changes, and from the
command line.

Only hashes are kept. A key is long and random, so its SHA-256 reveals nothing about it, and no
salt is needed.

    [[key]]
    name = "nightly-judge"
    role = "judge"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    expires = 2027-01-01T00:00:00Z

Each key has a role, and rules say which roles may use which routes.

A single trajectory has a key of its own: its name, and a code that only the holder of the secret
can make.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.routing import compile_path

from rollbook.store.errors import ConfigError, RequestError


class Role(StrEnum):
    """The purpose of a key. `trajectory` is the role of a trajectory's own key; no file can assign it."""

    operator = "operator"
    writer = "writer"
    judge = "judge"
    reader = "reader"
    trajectory = "trajectory"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from.

    Attributes:
        name: the key's name, as the log has it; None: no keys are checked.
        role: what it may do.
        key: the key as sent, where it names a trajectory.
    """

    name: str | None
    role: Role
    key: str | None = field(default=None, repr=False)

    @property
    def trajectory(self) -> str | None:
        """The trajectory that the caller's key names."""
        return key_name(self.key)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use a route.

    Attributes:
        path: as the application writes it; the first rule that fits a path counts.
        open: it answers without a key too.
        local: without keys it is for this host alone.
        browser: a browser may ask its user for the key.
    """

    method: str
    path: str
    roles: frozenset[Role]
    open: bool = False
    local: bool = False
    browser: bool = False


ANY = "*"
"""Any method."""


def _head(path: str) -> str:
    """A path's first part."""
    return path[1:].partition("/")[0]


class Rules:
    """The rules of an application, by path and method.

    Args:
        rules: the first one that fits a path counts.
        otherwise: the rule for paths that no other fits, such as routes that do not exist.
    """

    def __init__(self, rules: Iterable[Rule], otherwise: Rule) -> None:
        self._otherwise = otherwise
        self._compiled: dict[str, list[tuple[re.Pattern[str], Rule]]] = {}
        for rule in rules:
            self._compiled.setdefault(_head(rule.path), []).append((compile_path(rule.path)[0], rule))

    def of(self, method: str, path: str) -> Rule:
        """The rule of a request.

        Args:
            path: decoded, as routes are matched.
        """
        method = "GET" if method == "HEAD" else method
        for pattern, rule in self._compiled.get(_head(path), ()):
            if rule.method in (ANY, method) and pattern.match(path):
                return rule
        return self._otherwise


def check_role(caller: Caller, rule: Rule, method: str, path: str) -> None:
    """Refuse a request that the caller's role does not allow.

    Raises:
        RequestError: 403, it names who may.
    """
    if caller.role in rule.roles:
        return
    who = ", ".join(role.value for role in Role if role in rule.roles and role is not Role.trajectory)
    if caller.role is Role.trajectory:
        text = f"this API key is of one trajectory alone, and {method} {path[:200]} is for: {who}"
        raise RequestError(403, "other_trajectory", text)
    text = f"the key {caller.name!r} is a {caller.role.value}'s, and {method} {path[:200]} is for: {who}"
    raise RequestError(403, "not_permitted", text)


KEY_PREFIX = "trajectory:"
"""An API key that names a trajectory: `trajectory:ID`, or `trajectory:ID:MAC` where keys are checked."""


def sent_key(headers: Mapping[str, str]) -> str | None:
    """The API key of a request: OpenAI's clients send a bearer token, Anthropic's either of two headers."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return headers.get("x-api-key")


def typed_key(headers: Mapping[str, str]) -> str | None:
    """The API key that a browser's user typed as a password (RFC 7617), if there is one."""
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2] or None
    except ValueError:
        return None


def key_name(key: str | None) -> str | None:
    """The trajectory that an API key names, or None."""
    if key is None or not key.startswith(KEY_PREFIX):
        return None
    name = key.removeprefix(KEY_PREFIX)
    mac = name.rpartition(":")
    return unquote(mac[0] if mac[0] and re.fullmatch("[0-9a-f]{32}", mac[2]) else name) or None


def trajectory_key(name: str, run: str, secret: bytes | None) -> str:
    """The API key of one trajectory; with a secret, one that only its holder can make."""
    plain = KEY_PREFIX + name.replace("%", "%25").replace(":", "%3A")
    return plain if secret is None else f"{plain}:{_mac(name, run, secret)}"


def is_trajectory_key(key: str, run: str, secret: bytes) -> bool:
    """Whether a key is one that `trajectory_key` made of this run and secret."""
    name = key_name(key)
    return name is not None and hmac.compare_digest(
        key.encode(errors="surrogateescape"),
        trajectory_key(name, run, secret).encode(errors="surrogateescape"),
    )


def _mac(name: str, run: str, secret: bytes) -> str:
    return hmac.new(secret, f"{run}\n{name}".encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[
        :32
    ]


logger = logging.getLogger(__name__)

VARIABLE = "ROLLBOOK_API_KEYS"
LOOK_S = 1.0
"""Seconds between two checks of the file."""
ROLES = tuple(role for role in Role if role is not Role.trajectory)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PRINTABLE = re.compile(r"[!-~]+")
_FIELDS = {"name", "role", "sha256", "expires"}
_MOST_BYTES = 1 << 20
_NOT_FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Bits that the file's mode must not have. A group may read: that is how secrets are mounted."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: what the log calls it.
        sha256: of the key, hexadecimal.
        expires: from when on it is invalid; None: never.
    """

    name: str
    role: Role
    sha256: str
    expires: datetime | None = None

    def expired(self, now: datetime) -> bool:
        """Whether it has expired."""
        return self.expires is not None and now >= self.expires


def digest_of(key: str) -> str:
    """The stored form of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


# The command line ---------------------------------------------------------------------------


def given_keys(values: Sequence[str], environment: Mapping[str, str]) -> tuple[Key, ...]:
    """Operators' keys, named `api-key-1` and so on, from keys given in clear text.

    Raises:
        ConfigError: one is empty, cannot be sent, or comes twice; or the variable is set to
            nothing.
    """
    if environment.get(VARIABLE, "unset").strip() == "":
        raise ConfigError(f"{VARIABLE} is set and empty, which lets everybody in: unset it, or give it a key")
    for value in values:
        if _PRINTABLE.fullmatch(value) is None:
            what = "empty" if not value.strip() else "holds spaces or what is not ASCII"
            raise ConfigError(f"an --api-key {what}: give one of printable ASCII characters, without spaces")
        if value.startswith(KEY_PREFIX):
            text = f"an --api-key begins with {KEY_PREFIX!r}, as the keys of single trajectories do"
            raise ConfigError(f"{text}: give another")
    keys = [Key(f"api-key-{i}", Role.operator, digest_of(v)) for i, v in enumerate(values, 1)]
    return checked(keys, "--api-key")


def checked(keys: Sequence[Key], source: str) -> tuple[Key, ...]:
    """The keys, after checking that names and hashes are unique.

    Raises:
        ConfigError: two are the same.
    """
    names: set[str] = set()
    hashes: dict[str, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"{source}: two keys are named {key.name!r}: give each a name of its own")
        if key.sha256 in hashes:
            first = hashes[key.sha256]
            raise ConfigError(f"{source}: {first!r} and {key.name!r} are the same key: make another")
        names.add(key.name)
        hashes[key.sha256] = key.name
    return tuple(keys)


# The file -----------------------------------------------------------------------------------


def parsed(text: str, source: str) -> tuple[Key, ...]:
    """The keys of a file's text. Pure.

    Raises:
        ConfigError: it is not TOML, holds no key, or one of its keys is invalid.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error
    tables = values.get("key")
    if set(values) - {"key"} or not isinstance(tables, list) or not tables:
        raise ConfigError(f"{source} holds {sorted(values) or 'nothing'}: write [[key]] tables, at least one")
    return checked([_key(table, f"{source}, key {i}") for i, table in enumerate(tables, 1)], source)


def _key(table: Any, where: str) -> Key:
    if not isinstance(table, dict) or not {"name", "role", "sha256"} <= set(table) <= _FIELDS:
        raise ConfigError(f"{where}: write name, role, sha256, and perhaps expires, and nothing else")
    name, role, sha256 = table["name"], table["role"], table["sha256"]
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        text = "sha256 must be the 64 small hexadecimal digits of the key's hash, never the key itself"
        raise ConfigError(f"{where}: {text}")
    return Key(
        checked_name(name, where), checked_role(role, where), sha256, _expiry(table.get("expires"), where)
    )


def checked_name(name: Any, where: str) -> str:
    """The name, if it is valid.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name == Role.trajectory:
        text = f"{where}: name is {name!r}: use letters, digits, '.', '_', '@' and '-', at most 64"
        raise ConfigError(f"{text}, and not {Role.trajectory.value!r}")
    return name


def checked_role(role: Any, where: str) -> Role:
    """The role, if a key may have it.

    Raises:
        ConfigError: it may not.
    """
    if role not in ROLES:
        raise ConfigError(f"{where}: role is {role!r}: use one of {', '.join(ROLES)}")
    return Role(role)


def _expiry(value: Any, where: str) -> datetime | None:
    """A point in time; for a day its beginning, UTC."""
    if value is None:
        return None
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time(), UTC)
    text = f"expires is {value!r}: write a day, such as 2027-01-01, or a time with its zone"
    raise ConfigError(f"{where}: {text}, such as 2027-01-01T12:00:00Z")


def expiry_of(text: str) -> datetime:
    """A day or a time as it is written on a command line.

    Raises:
        ConfigError: it is none.
    """
    try:
        value: Any = tomllib.loads(f"at = {text}")["at"]
    except tomllib.TOMLDecodeError:
        value = text
    expiry = _expiry(value, "--expires")
    assert expiry is not None
    return expiry


def keys_of(values: Sequence[str], file: Path | None, environment: MutableMapping[str, str]) -> Keys:
    """The keys that `rollbook serve` was given; its children's environment holds none of them.

    Raises:
        ConfigError: one of them, or the file, cannot be used.
    """
    given = given_keys(values, environment)
    environment.pop(VARIABLE, None)
    return Keys(given, file)


Signature = tuple[int, int, int, int]


def _signature(status: os.stat_result) -> Signature:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _looks(file: Path) -> Signature | None:
    try:
        return _signature(os.stat(file))
    except OSError:
        return None


def read_keys(file: Path) -> tuple[tuple[Key, ...], Signature]:
    """(the keys of a file, the signature that shows whether it has changed)

    Raises:
        ConfigError: it cannot be read, others may read it, or it does not hold keys.
    """
    try:
        # Not waiting: a pipe of that name would never be opened.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as opened:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise ConfigError(f"{file} is no file of keys: make one with `rollbook keys add`")
            if status.st_mode & _NOT_FOR_OTHERS:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{file} has mode {mode:04o}, so others may use it: chmod 600 {file}")
            text = opened.read().decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: make it with `rollbook keys add`") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from error
    return parsed(text, str(file)), _signature(status)


class Keys:
    """The keys that open a proxy, as they are now.

    Args:
        given: those of the command line.
        file: of others; read now, and again by `look`.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, given: Sequence[Key] = (), file: Path | None = None) -> None:
        self._given, self.file = tuple(given), file
        self._keys = self._given
        self._seen: Signature | None = None
        self.failure: str | None = None
        """Why the file cannot be read now, or None; the keys read last stay valid."""
        if file is not None:
            self._read(file)

    @property
    def configured(self) -> bool:
        """Whether keys are checked at all."""
        return bool(self._given) or self.file is not None

    def roles(self) -> dict[str, str]:
        """Name -> role, for `run.opened`."""
        return {key.name: key.role.value for key in self._keys}

    def trouble(self) -> dict[str, str]:
        """For `/healthz`: why the file cannot be read, if it cannot."""
        return {} if self.failure is None else {"keys": self.failure}

    def find(self, sent: str) -> Key | None:
        """The configured key that equals the one sent. All are compared, each in constant time."""
        digest, match = digest_of(sent), None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                match = key
        return match

    def look(self) -> None:
        """Read the file again if it has changed; if it is invalid, report that and keep the present
        keys."""
        if self.file is None:
            return
        if self.failure is None and _looks(self.file) == self._seen:
            return
        try:
            self._read(self.file)
        except ConfigError as error:
            if str(error) != self.failure:
                logger.warning("%s; the keys that it held last stay good", error)
            self.failure = str(error)
            return
        logger.warning("%s is read again: %s", self.file, ", ".join(self.roles()))
        self.failure = None

    async def follow(self) -> None:
        """Check the file for changes, until cancelled."""
        while self.file is not None:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def _read(self, file: Path) -> None:
        keys, signature = read_keys(file)
        self._keys, self._seen = checked([*self._given, *keys], str(file)), signature


MADE = "rollbook-"
"""Prefix of keys made here, so that scanners for leaked secrets recognise them."""


def add_key(file: Path, name: str, role: str, expires: datetime | None, prefix: str = "") -> str:
    """Make a key and add its hash to a file, which is created if missing; the key, shown only this once.

    Args:
        prefix: what it begins with, where a client asks for that.

    Raises:
        ConfigError: the name is taken or invalid, the role is invalid, or the file cannot be
            used; it is unchanged.
    """
    if _PREFIX.fullmatch(prefix) is None:
        raise ConfigError(f"--prefix {prefix!r}: use letters, digits, '.', '_' and '-', at most 32")
    key = prefix + MADE + secrets.token_urlsafe(32)
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
    """Replace a file's content, atomically and durably, keeping its mode and owner."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
            if file.exists():
                before = file.stat()
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, before.st_uid, before.st_gid)
            stream.flush()
            os.fsync(fd)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
