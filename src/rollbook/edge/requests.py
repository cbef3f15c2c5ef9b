"""How many requests are answered at once, and what happens to one whose client disconnects before
its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollbook.store.errors import LimitError


@dataclass(slots=True, eq=False)
class RequestSlots:
    """Slots for requests that are being answered: taken when their body has arrived, until their
    reply is sent."""

    most: int
    taken: int = 0

    def check(self) -> None:
        """Refuse a request beyond those that may be answered at once.

        Raises:
            LimitError: 429.
        """
        if self.taken >= self.most:
            text = f"{self.taken} requests are running, as many as --max-running allows: try again"
            raise LimitError(429, "too_many_requests", text)

    @contextmanager
    def taken_by_one(self) -> Iterator[None]:
        """Take a slot. If the block fails it is freed; otherwise `release` frees it.

        Raises:
            LimitError: 429.
        """
        self.check()
        self.taken += 1
        try:
            yield
        except BaseException:
            self.taken -= 1
            raise

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend one's slot to others meanwhile; coming back is not limited."""
        self.taken -= 1
        try:
            yield
        finally:
            self.taken += 1

    def release(self) -> None:
        """Free a slot: the reply is sent, or its client is gone."""
        self.taken -= 1


Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection."""


async def until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return once the client of a request, whose body was read, has gone.

    A cancelled task keeps the frame that it stood in. This one knows no object that could know the task: a
    circle would keep the request and all that was made of it in memory until the next collection.

    Args:
        receive: ASGI's.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientWatch:
    """Notices when the client of a request has gone. The request's body must have been read.

    Args:
        receive: ASGI's.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self._task = asyncio.create_task(until_gone(receive))

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
