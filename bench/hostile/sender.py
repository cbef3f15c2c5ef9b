"""The attacker's client: requests as bytes, over connections with arbitrary behaviour."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httptools

ATTACKER = "127.0.0.2"
"""Attacks come from another address than honest traffic: limits are per client."""
ANSWER_S = 20.0
CUT = 0
"""The status of a connection that ends, or stays silent, without an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: CUT as its status if nothing did."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Parsed:
    """One response, as httptools tells it."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.whole = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.whole = self.parser.get_status_code() != 100

    def answer(self) -> Answer:
        """The part that has arrived so far."""
        return Answer(self.parser.get_status_code() or CUT, self.headers, b"".join(self.parts))


@dataclass(slots=True)
class Wire:
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send; a server that has hung up meanwhile is what many attacks are for."""
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self, seconds: float = ANSWER_S) -> Answer:
        """The next response, or as much of it as came in time."""
        parsed = _Parsed()
        with contextlib.suppress(OSError, TimeoutError, httptools.HttpParserError):
            async with asyncio.timeout(seconds):
                while not parsed.whole:
                    data = await self.reader.read(65536)
                    if not data:
                        break
                    parsed.parser.feed_data(data)
        return parsed.answer()

    def abort(self) -> None:
        """End it at once, with a reset if anything is on its way."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(host: str, port: int, *, small_window: bool = False) -> AsyncIterator[Wire]:
    """A connection from the attacker's address, which ends with the context.

    Args:
        small_window: receive as little as possible until it is read.

    Raises:
        OSError: it is refused.
    """
    limit = 1024 if small_window else 1 << 20
    reader, writer = await asyncio.open_connection(host, port, local_addr=(ATTACKER, 0), limit=limit)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request(
    method: str,
    path: str | bytes,
    host: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> bytes:
    """A request as bytes; nothing of it is checked. A body gets its length unless a header says another."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogatepass")
    fields = {"Host": host, **(headers or {})}
    framed = {name.lower() for name in fields} & {"content-length", "transfer-encoding"}
    if body is not None and not framed:
        fields["Content-Length"] = str(len(body))
    lines = [f"{name}: {value}".encode("utf-8", "surrogateescape") for name, value in fields.items()]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method.encode(), raw), *lines, b"", body or b""])
