"""What the workers of a proxy, and the proxies of a run, ask each other by: one interface, two ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from rollbook.store.events import Json

Handler = Callable[[int, int, Json], Awaitable[tuple[Json, bytes]]]
"""Answers (the asking one, what tells its question from all others, the question) with JSON and bytes."""


class Asks(Protocol):
    """One's end of it."""

    def on(self, kind: str, handler: Handler) -> Callable[[], object]:
        """Have a handler answer questions of this kind.

        Returns:
            What ends that.
        """

    def on_begun(self, callback: Callable[[int], None]) -> Callable[[], object]:
        """Call back with the number of another one that began, in the place of one that died perhaps.

        Returns:
            What ends that.
        """

    async def ask(
        self, to: int, kind: str, words: Json | None = None, patience_s: float | None = 5.0
    ) -> tuple[Json, bytes]:
        """What another one answers. It is asked again if another process takes its place meanwhile.

        Raises:
            RequestError: 503, it did not answer in time; or what it raised.
        """

    async def ask_all(self, kind: str, words: Json | None = None) -> dict[int, tuple[Json, bytes] | None]:
        """What each other one answers, by number; None: it did not."""
