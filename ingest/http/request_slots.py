"""How many requests are answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollbook.store.errors import LimitError


@dataclass(slots=True, eq=False)
class RequestSlots:
    """Slots for requests that are being answered: from when their body is there until their reply is sent."""

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
        """Take a slot. Where the block fails it is free again; else from `release` on.

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
        """Leave one's slot to others meanwhile, without a limit on coming back."""
        self.taken -= 1
        try:
            yield
        finally:
            self.taken += 1

    def release(self) -> None:
        """Free a slot: the reply is sent, or its client is gone."""
        self.taken -= 1
