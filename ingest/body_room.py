"""Room for requests' bodies in memory, each within its limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from rollbook.ingest.options import ProxyOptions
from rollbook.store.errors import RequestError


class BodyRoom:
    """Room for bodies in memory: who finds none waits, so that a burst of large ones is taken in turn."""

    def __init__(self, options: ProxyOptions) -> None:
        self._most, self._free = options.max_body_bytes, options.max_bodies_bytes
        self._whole = options.max_bodies_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body, and room for it while the context lasts.

        Raises:
            RequestError: 413, it is too large.
        """
        size = self._declared(request)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            raw = await self._read(request, size)
            if len(raw) < size:  # its length was not declared, and it may be kept for long
                await self._give_back(size - len(raw))
                size = len(raw)
            yield raw
        finally:
            await self._give_back(size)

    async def _give_back(self, size: int) -> None:
        async with self._changed:
            self._free += size
            self._changed.notify_all()

    def _declared(self, request: Request) -> int:
        length = request.headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() else self._most
        if size > self._most and length:
            raise self._too_large()
        return min(size, self._whole)

    async def _read(self, request: Request, size: int) -> bytes:
        parts: list[bytes] = []
        total = 0
        async for part in request.stream():
            total += len(part)
            if total > self._most:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> RequestError:
        text = f"the body is larger than {self._most} bytes, which --max-body-mb allows"
        return RequestError(413, "body_too_large", text)
