"""The gate in front of an engine's batch: shut for as long as there is a reason, and who is behind it."""

from __future__ import annotations

import asyncio


class Gate:
    """Lets requests in, or holds them. `open` and `empty` are set accordingly; it starts shut.

    Attributes:
        shut_for: the reasons why it is shut.
    """

    def __init__(self) -> None:
        self.open, self.empty = asyncio.Event(), asyncio.Event()
        self.empty.set()
        self.shut_for: set[str] = {"start"}
        self._inside = 0

    def shut(self, reason: str) -> None:
        """Hold new requests."""
        self.shut_for.add(reason)
        self.open.clear()

    def release(self, reason: str) -> None:
        """Take a reason back; without any left, new requests are let in."""
        self.shut_for.discard(reason)
        if not self.shut_for:
            self.open.set()

    async def passed(self) -> None:
        """Return once it is open."""
        while not self.open.is_set():  # it may have shut again before this task woke
            await self.open.wait()

    def enter(self) -> None:
        """Note a request that enters."""
        self._inside += 1
        self.empty.clear()

    def leave(self) -> None:
        """Note a request that leaves."""
        self._inside -= 1
        if not self._inside:
            self.empty.set()
