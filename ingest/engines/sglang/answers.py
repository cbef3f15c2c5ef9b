"""What an engine answers, read within bounds: one that never ends takes no memory without end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from rollbook.store.errors import EngineError

MOST_BYTES = 512 << 20
"""Of one answer, or one line of a stream: the experts of a hundred thousand tokens are a third of it."""
TOLD_BYTES = 8 << 20
"""Of an error, or of what nobody reads."""


async def read_answer(reply: aiohttp.ClientResponse, most: int = MOST_BYTES) -> bytes:
    """The whole body.

    Raises:
        EngineError: it is larger than that.
    """
    found = bytearray()
    async for data in reply.content.iter_any():
        found += data
        _check(reply, len(found), most)
    return bytes(found)


async def read_lines(reply: aiohttp.ClientResponse, most: int = MOST_BYTES) -> AsyncIterator[bytes]:
    """A stream's lines, however they are cut into packets.

    Raises:
        EngineError: one is longer than that.
    """
    rest = bytearray()
    async for data in reply.content.iter_any():
        *lines, last = data.split(b"\n")
        for line in lines:
            yield bytes(rest + line)
            rest.clear()
        rest += last
        _check(reply, len(rest), most)


def _check(reply: aiohttp.ClientResponse, size: int, most: int) -> None:
    if size > most:
        path = reply.url.path
        raise EngineError(f"the engine's answer to {path} goes on after {most} bytes: is it one?")
