"""Parses how much retention keeps: `7d`, `500GiB` or `versions:20`.

Pure. Stricter than Pydantic's ByteSize, which reads a number without a unit as bytes and ignores the case of
units: a misread value would remove data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollbook.store.errors import UpkeepError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")
_VERSIONS = re.compile(r"versions:(\d{1,9})")


@dataclass(frozen=True, slots=True)
class KeepAge:
    """Units whose newest event is at most this old, in microseconds, stay."""

    text: str
    age_us: int


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """The newest units stay, as many as fit into this many bytes with all that is not sealed."""

    text: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KeepVersions:
    """Units with a token of the newest `count` published versions of its policy, or the one before, stay."""

    text: str
    count: int


Keep = KeepAge | KeepBytes | KeepVersions


def parse_keep(text: str) -> Keep:
    """Parse a SPEC: a number with a unit of time or of bytes, or `versions:N`.

    Raises:
        UpkeepError: it says neither.
    """
    if (versions := _VERSIONS.fullmatch(text)) is not None:
        return KeepVersions(text, int(versions[1]))
    amount = _AMOUNT.fullmatch(text)
    if amount is not None and amount[2] in _SECONDS:
        return KeepAge(text, round(float(amount[1]) * _SECONDS[amount[2]] * 1e6))
    if amount is not None and amount[2] in _BYTES:
        return KeepBytes(text, round(float(amount[1]) * _BYTES[amount[2]]))
    raise UpkeepError(
        f"--keep {text!r}: write an age ({', '.join(_SECONDS)}; e.g. 7d or 12h), a size "
        f"({', '.join(_BYTES)}; e.g. 500GiB), or versions:N (e.g. versions:20)"
    )
