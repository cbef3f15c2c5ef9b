"""Keys of single trajectories: their name, and a code that only who holds the secret can make. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from urllib.parse import unquote

KEY_PREFIX = "trajectory:"
"""An API key that names a trajectory: `trajectory:ID`, or `trajectory:ID:MAC` where keys are checked."""


def sent_key(headers: Mapping[str, str]) -> str | None:
    """The API key of a request: OpenAI's clients send a bearer token, Anthropic's either of two headers."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return headers.get("x-api-key")


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
