"""One start of a run: the mark of all that it starts, and the guard that ends what outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rollbook.ingest.engines.whose import START
from rollbook.ingest.rollouts.isolation import interpreter
from rollbook.online import guard

CLOSED_S = guard.INSIST_S + 5.0


class Guard:
    """The process that ends what is left of this start once this process is gone; Linux only.

    Args:
        mark: of the start.
        say: told what somebody should know.
    """

    def __init__(self, mark: str, say: Callable[[str], None]) -> None:
        self.mark, self._say = mark, say
        self._child: asyncio.subprocess.Process | None = None
        self._pipe = -1
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it."""
        if sys.platform != "linux":
            return
        await self._begin()
        self._watching = asyncio.create_task(self._watch())

    async def _begin(self) -> None:
        """Start one; only this process holds the end of its pipe."""
        reading, self._pipe = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *(interpreter(), "-I", "-S", str(Path(guard.__file__).resolve()), f"{START}={self.mark}"),
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if key != START},
                cwd="/",
                start_new_session=True,  # a terminal that is closed, or its Ctrl-C, is not for it
            )
        finally:
            os.close(reading)

    async def _watch(self) -> None:
        """Start another one when it is ended by somebody."""
        while True:
            assert self._child is not None
            await self._child.wait()
            self._say("the guard of this run was ended: it is started again")
            os.close(self._pipe)
            await self._begin()
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Have it end what is left after all parts were stopped, and end."""
        if self._child is None or self._watching is None:
            return
        self._watching.cancel()
        with contextlib.suppress(OSError):
            os.write(self._pipe, guard.ENDED)
        os.close(self._pipe)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), CLOSED_S)


@contextlib.asynccontextmanager
async def guarded(mark: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Context: nothing of this start outlives it, however it ends."""
    one = Guard(mark, say)
    await one.start()
    try:
        yield
    finally:
        await one.close()
