"""The secrets of a request and its reply, so that a recorded error of the upstream does not hold them.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import parse_qsl

from rollbook.store.redaction import credentials, is_secret_name
from rollbook.store.redaction.text import opens

Headers = Sequence[tuple[bytes, bytes]]


def sent_credentials(headers: Headers, query: str, own: Iterable[str]) -> set[str]:
    """The secrets that a request came with, or is sent on with.

    Args:
        query: of its address, behind the question mark.
        own: keys and logins of the proxy's own.
    """
    found = {part for secret in own for part in credentials(secret)}
    for name, value in headers:
        text = value.decode("utf-8", "replace")
        if name.lower() == b"cookie":
            found |= {pair.partition("=")[2].strip() for pair in text.split(";")} | {text}
        elif is_secret_name(name.decode("latin-1")):
            found |= credentials(text)
    pairs = parse_qsl(query, errors="replace")
    return found | {value for name, value in pairs if opens(name)}


def given_cookies(headers: Headers) -> set[str]:
    """The values of the cookies that a reply sets."""
    lines = [value.decode("utf-8", "replace") for name, value in headers if name.lower() == b"set-cookie"]
    return {line.partition(";")[0].partition("=")[2].strip() for line in lines} - {""}
