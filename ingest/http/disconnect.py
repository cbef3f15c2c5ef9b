"""A client that may go away before it has its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection."""


class ClientWatch:
    """Notices when the client of a request has gone. The request's body must have been read.

    Args:
        receive: ASGI's.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self._receive = receive
        self._task = asyncio.create_task(self._until_gone())

    @property
    def gone(self) -> bool:
        """Whether the client has gone."""
        return self._task.done()

    async def race(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of the work, which is cancelled when the client goes.

        Raises:
            ClientGone: it has.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
