"""Questions between proxies, asked of whoever holds a seat: as workers of one proxy ask each other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollbook.ingest.peers.messages import GIVE_BACK, HOLDS, check_question, read_message
from rollbook.ingest.peers.seats import LOOK_S, Seats
from rollbook.ingest.peers.wire import MovedError, UnreachableError, answer_of
from rollbook.ingest.workers.asks import Handler
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

ASK_S = 30.0
"""So long one answer may take before it is asked for again, by the same word."""

logger = logging.getLogger(__name__)


class ProxyAwayError(RequestError):
    """The proxy that something is for cannot be reached now, and nobody stands in for it yet."""

    def __init__(self, seat: int) -> None:
        text = f"proxy {seat} of this run does not answer now, and none stands in for it yet: try again"
        super().__init__(503, "proxy_away", text)


@dataclass(slots=True, eq=False)
class PeerBus:
    """One proxy's end: see `workers.asks.Asks`; numbers are those of seats."""

    seats: Seats
    _handlers: dict[str, Handler] = field(default_factory=dict)

    def on(self, kind: str, handler: Handler) -> Callable[[], object]:
        """Have a handler answer questions of this kind."""
        self._handlers[kind] = handler
        return lambda: self._handlers.pop(kind, None)

    def on_begun(self, callback: Callable[[int], None]) -> Callable[[], object]:
        """Call back with the number of another proxy that began, or is stood in for."""
        self.seats.on_begun.append(callback)
        return lambda: self.seats.on_begun.remove(callback)

    async def ask(
        self, to: int, kind: str, words: Json | None = None, patience_s: float | None = 5.0
    ) -> tuple[Json, bytes]:
        """What the holder of a seat answers; a new one is asked again.

        Raises:
            ProxyAwayError: none did in time.
            RequestError: what it raised.
        """
        until = None if patience_s is None else time.monotonic() + patience_s
        while True:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            holder = self.seats.holder(to)
            try:
                if holder == self.seats.place.number:
                    async with asyncio.timeout(left):
                        return await self._answered(holder, to, kind, words or {})
                if holder is not None:
                    asked = {"seat": to, "words": words or {}}
                    # One that is there no more may be waited for without end: it is asked again.
                    within = ASK_S if left is None else min(left, ASK_S)
                    said = await self.seats.wire.post(holder, kind, asked, within)
                    return said["words"], b""
            except (UnreachableError, MovedError, TimeoutError):
                pass
            if until is not None and time.monotonic() >= until:
                raise ProxyAwayError(to)
            await self.seats.looked(holder, min(LOOK_S, left or LOOK_S))

    async def ask_all(self, kind: str, words: Json | None = None) -> dict[int, tuple[Json, bytes] | None]:
        """What each other proxy answers that can be reached, by number; None: it did not."""

        async def one(number: int) -> tuple[Json, bytes] | None:
            if not self.seats.answers(number):
                return None
            with contextlib.suppress(UnreachableError, MovedError, RequestError):
                said = await self.seats.wire.post(number, kind, {"seat": number, "words": words or {}})
                return said["words"], b""
            return None

        others = self.seats.wire.others
        found = await asyncio.gather(*map(one, others))
        return dict(zip(others, found, strict=True))

    async def _answered(self, sender: int, seat: int, kind: str, words: Json) -> tuple[Json, bytes]:
        """What this proxy answers to a question for a seat.

        Raises:
            MovedError: it does not hold the seat, or not any more.
        """
        handler = self._handlers.get(kind)
        if handler is None or seat not in self.seats.place.holds:
            raise MovedError
        task = asyncio.ensure_future(handler(sender, words.get("token", 0), words))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise MovedError  # it was given up in the middle
        return task.result()

    async def answer(self, kind: str, said: bytes) -> bytes:
        """The body of this proxy's answer to another one's POST.

        Raises:
            RequestError: 400, it has not the form of a question.
        """
        asked = check_question(kind, read_message(said), len(self.seats.wire.addresses))
        try:
            self.seats.met(asked["from"], asked["process"])
            if kind in (HOLDS, GIVE_BACK):
                return answer_of(await self.seats.answer(kind, asked))
            words, _ = await self._answered(asked["from"], asked["seat"], kind, asked["words"])
            return answer_of({"words": words})
        except (MovedError, RequestError) as error:
            return answer_of(error)
        except Exception as error:
            logger.exception("rollbook: a proxy's question %r failed", kind)
            return answer_of(RequestError(500, "internal_error", f"{type(error).__name__} in another proxy"))
