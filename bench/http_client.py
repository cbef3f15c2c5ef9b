"""A lean HTTP/1.1 client: one connection, kept alive, one request at a time, bodies in parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response: its status, its body, and seconds from sending to its first and last byte."""

    status: int
    body: bytes
    first_s: float
    whole_s: float


class Connection(asyncio.Protocol):
    """One connection to a server; it is opened again when the server has closed it in between."""

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout = timeout_s
        self._transport: asyncio.Transport | None = None
        self._future: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._first = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def post(self, path: str, body: Sequence[bytes], headers: bytes = b"") -> Reply:
        """POST the body, whose parts are sent as they are.

        Raises:
            OSError: no connection, or it broke.
            TimeoutError: no whole reply in time.
        """
        length = sum(map(len, body))
        kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % length
        return await self._send([self._head(b"POST", path, kind + headers), *body])

    async def get(self, path: str) -> Reply:
        """GET; raises as `post` does."""
        return await self._send([self._head(b"GET", path, b"")])

    def _head(self, method: bytes, path: str, fields: bytes) -> bytes:
        host = b"%b:%d" % (self._host.encode(), self._port)
        return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (method, path.encode(), host, fields)

    async def _send(self, parts: Sequence[bytes]) -> Reply:
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            self._transport, _ = await loop.create_connection(lambda: self, self._host, self._port)
        self._future, self._parts, self._first = loop.create_future(), [], 0.0
        self._parser = httptools.HttpResponseParser(self)
        begun = time.perf_counter()
        if len(parts) == 1 or sum(map(len, parts)) < 65536:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        try:
            async with asyncio.timeout(self._timeout):
                await self._future
        except TimeoutError:
            self._transport.abort()
            raise
        end = time.perf_counter()
        return Reply(self._parser.get_status_code(), b"".join(self._parts), self._first - begun, end - begun)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol, and httptools' callbacks -------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._future is not None and not self._future.done():
            self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(ConnectionResetError(f"the server hung up: {error}"))

    def on_body(self, body: bytes) -> None:
        """A part of the body came."""
        if not self._parts:
            self._first = time.perf_counter()
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
