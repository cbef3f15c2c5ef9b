"""What an engine answers, read within bounds: one that never ends takes no memory without end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from rollbook.ingest.server_sent_events import Message, MessageReader
from rollbook.store.errors import EngineError

MOST_BYTES = 512 << 20
"""Of one answer, or one message of a stream: the experts of a hundred thousand tokens are a third of it."""
TOLD_BYTES = 8 << 20
"""Bytes read of an error's body, or of a body that is not used."""


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


async def read_stream(reply: aiohttp.ClientResponse, most: int = MOST_BYTES) -> AsyncIterator[Message]:
    """A stream's messages, however they are cut into packets; one that is cut short at the end is dropped.

    Raises:
        EngineError: one is longer than that.
    """
    reader = MessageReader()
    async for data in reply.content.iter_any():
        for message in reader.feed(data):
            yield message
        _check(reply, reader.waiting, most)


def _check(reply: aiohttp.ClientResponse, size: int, most: int) -> None:
    if size > most:
        path = reply.url.path
        raise EngineError(f"the engine's answer to {path} goes on after {most} bytes: is it one?")
