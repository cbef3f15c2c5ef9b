"""Faults of a scripted server: a route that hangs, fails, takes a tensor wrong, or ends the process."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one route.

    `hang` waits `seconds` before it answers as ever; `error` is an HTTP 500, and nothing is done; `drop` ends
    the connection, and nothing is done; `wrong` takes one value of the first tensor wrong, and answers
    success; `die` ends the whole process, so the server must be one of its own.

    Attributes:
        after: calls of the route that go well before.
        times: calls that go wrong; -1: all that follow.
    """

    route: str
    kind: Literal["hang", "error", "drop", "wrong", "die"]
    after: int = 0
    times: int = 1
    seconds: float = 0.0


class Faults:
    """The faults of a server, and how often each route has been called."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self._calls: Counter[str] = Counter()
        self._wrong: set[str] = set()

    def add(self, fault: Fault) -> None:
        """Add a fault; calls are counted from now on."""
        self.faults.append(fault)
        self._calls[fault.route] = 0

    async def befall(self, route: str) -> str | None:
        """Count a call; returns `error` or `drop` if the call is to fail so."""
        self._calls[route] += 1
        self._wrong.discard(route)
        for fault in self.faults:
            number = self._calls[route] - fault.after
            if fault.route != route or number < 1 or 0 <= fault.times < number:
                continue
            if fault.kind == "die":
                os._exit(9)
            if fault.kind in ("error", "drop"):
                return fault.kind
            if fault.kind == "wrong":
                self._wrong.add(route)
            await asyncio.sleep(fault.seconds)
        return None

    def spoils(self, route: str) -> bool:
        """Whether the call under way takes a tensor wrong."""
        return route in self._wrong
