"""Helpers for any forwarded request, whether to an upstream or to another proxy of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp

CONNECT_S = 10.0
KEEP_ALIVE_S = 4.0
"""Idle connections are closed before common servers close them: a request must not be sent twice."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Hop-by-hop headers (RFC 9110), which are not forwarded; nor are those that `connection` names."""

MADE_ANEW = frozenset({b"host", b"content-length", b"expect"})
"""Headers that are made anew for the forwarded request."""

Headers = Sequence[tuple[bytes, bytes]]


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Headers, by lower-case name, without hop-by-hop headers."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {
        word.strip() for name, value in lower if name == b"connection" for word in value.lower().split(b",")
    }
    return [(name, value) for name, value in lower if name not in HOP_BY_HOP and name not in named]


def header_value(value: bytes) -> str:
    """A header's value as text that is encoded to the same bytes, as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def plain_session(
    connect_s: float = CONNECT_S, keep_alive_s: float | None = KEEP_ALIVE_S
) -> aiohttp.ClientSession:
    """A client session that adds nothing: no headers, no shared cookies, no decoding.

    Args:
        keep_alive_s: of idle connections; None: each request has its own connection.
    """
    keep_alive: Any = {"force_close": True} if keep_alive_s is None else {"keepalive_timeout": keep_alive_s}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **keep_alive),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        auto_decompress=False,
    )
