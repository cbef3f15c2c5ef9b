"""Decodes bodies by their content encoding, within bounds: those of requests and of an upstream's replies.
Pure."""

from __future__ import annotations

import zlib

from rollbook.store.errors import LimitError, RequestError

MOST_CODINGS = 2
MOST_MEMBERS = 64
"""A gzip file may be several, one behind another; each costs a copy of what follows."""
_GZIP, _ZLIB, _RAW = 31, 15, -15


def codings(encoding: str) -> list[str]:
    """The codings that a `Content-Encoding` names, but for those that do nothing."""
    names = [name.strip().lower() for name in encoding.split(",")]
    return [name for name in names if name not in ("", "identity")]


def decoded(body: bytes, encoding: str, limit: int, *, whole: bool = True) -> bytes:
    """The body without its content encoding. It takes a thread for a while: never call it on an event loop.

    Args:
        encoding: the header `Content-Encoding`; gzip, deflate and identity are read.
        limit: most bytes it may have on the way and at the end.
        whole: whether a body that ends too early is refused; else it is given as far as it came.

    Raises:
        LimitError: 413, it is larger, or was encoded too often.
        RequestError: 415, it has an encoding that is not read here; 400, it is not encoded so.
    """
    names = codings(encoding)
    if len(names) > MOST_CODINGS:
        text = f"the body is encoded {len(names)} times: encode it at most {MOST_CODINGS} times"
        raise LimitError(413, "encoded_too_often", text)
    for name in reversed(names):
        if name in ("gzip", "x-gzip"):
            body = _inflated(body, _GZIP, limit, whole=whole)
        elif name == "deflate":
            body = _inflated(body, _ZLIB if _has_zlib_header(body) else _RAW, limit, whole=whole)
        else:
            text = f"the body's content-encoding is {name[:100]!r}: send gzip, deflate or none"
            raise RequestError(415, "unsupported_encoding", text)
    return body


def _has_zlib_header(body: bytes) -> bool:
    """Whether it begins with the zlib header that HTTP asks for; some senders leave it out."""
    return len(body) < 2 or (body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0)


def _inflated(body: bytes, wbits: int, limit: int, *, whole: bool) -> bytes:
    parts: list[bytes] = []
    size = members = 0
    while body or not members:
        inflater = zlib.decompressobj(wbits)
        try:
            parts.append(inflater.decompress(body, limit - size + 1))
        except zlib.error as error:
            raise RequestError(400, "bad_encoding", f"the body is not encoded as it says: {error}") from error
        size, members = size + len(parts[-1]), members + 1
        if size > limit or members > MOST_MEMBERS:
            text = f"the body is larger than {limit} bytes without its content-encoding"
            text = text if size > limit else f"the body is made of more than {MOST_MEMBERS} gzip files"
            raise LimitError(413, "body_too_large", f"{text}: send less at once")
        if not inflater.eof:
            if whole:
                text = "the body ends before its content-encoding does: send all of it"
                raise RequestError(400, "bad_encoding", text)
            break
        body = inflater.unused_data if wbits == _GZIP else b""
    return b"".join(parts)
