"""What the proxy that holds the first seat does for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rollbook.ingest.peers.seats import Seats
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.workers.place import FIRST


class Duty(Protocol):
    """Something that one proxy does for all."""

    async def begin(self, runs: RunReader) -> None:
        """Do it from now on, beginning with what there is in the run."""

    async def end(self) -> None:
        """Another proxy does it from now on, or nobody."""


@contextlib.asynccontextmanager
async def first_does(seats: Seats, duties: Sequence[Duty]) -> AsyncIterator[None]:
    """Do the duties within the context, while this proxy holds the first seat, its own or another's."""
    doing: list[Duty] = []

    async def gained(seat: int, runs: RunReader) -> None:
        if seat == FIRST:
            for duty in duties:
                await duty.begin(runs)
                doing.append(duty)

    async def lost(seat: int) -> None:
        while seat == FIRST and doing:
            await doing.pop().end()

    seats.on_gained.append(gained)
    seats.on_lost.append(lost)
    if seats.place.is_first:
        await gained(FIRST, seats.recorder.known_run)
    try:
        yield
    finally:
        await lost(FIRST)
