"""Whose a request is, among the proxies of a run; and that it gets there.

A trajectory that is open belongs to the proxy whose lane it is in. A name that is new, or whose trajectory
has ended, belongs to whoever holds the seat that it falls to. A request for another proxy's trajectory is
sent on to that one, whole, and its reply comes back as it is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from multidict import CIMultiDict
from starlette.requests import Request
from starlette.responses import Response
from yarl import URL

from rollbook.ingest.http.disconnect import ClientGone, ClientWatch
from rollbook.ingest.http.forwarding import MADE_ANEW, end_to_end
from rollbook.ingest.http.head import moves_cursor, named_by_head
from rollbook.ingest.http.siblings import KNOWS, knower_of
from rollbook.ingest.peers.asking import PeerBus, ProxyAwayError
from rollbook.ingest.peers.duties import Duty, first_does
from rollbook.ingest.peers.seats import LOOK_S, Seats
from rollbook.ingest.peers.wire import TOKEN_HEADER
from rollbook.ingest.trajectories.identity import TRAJECTORY_HEADER
from rollbook.ingest.workers.place import FIRST, owner_of
from rollbook.store.events import Json

SENT_AS_HEADER, MOVED_HEADER = "x-rollbook-sent-as", "x-rollbook-moved"
SENT_AS = "rollbook.sent_as"
"""The key under which a request's scope says as what another proxy sent it here."""
PATIENCE_S = 20.0
"""So long a request waits for a proxy that is gone to be stood in for."""
_NOT_SENT_ON = MADE_ANEW | {TOKEN_HEADER.encode(), SENT_AS_HEADER.encode(), b"origin", b"referer"}
"""Where a page is from was checked by the proxy that it asked."""
_OF_THE_SERVER = frozenset({b"date", b"server"})

As = Literal["holder", "writer", "knower"]


@dataclass(frozen=True, slots=True)
class To:
    """Where a request belongs.

    Attributes:
        number: of a seat, or of a proxy.
        role: as what that one is sent it: the holder of the seat; the one that writes the trajectory; or the
            one that knows a reply, or keeps what names nothing, and is not to ask again.
    """

    number: int
    role: As


Whose = Callable[[], To | None]
"""Says where a request belongs as far as is known now; None: here."""


class PassOnError(Exception):
    """A request turns out to be another proxy's, now that its body is read.

    Attributes:
        raw: the body; plain: whether that is without its content encoding.
    """

    def __init__(self, whose: Whose, raw: bytes, *, plain: bool = True) -> None:
        super().__init__("another proxy's")
        self.whose, self.raw, self.plain = whose, raw, plain


@dataclass(slots=True, eq=False)
class Peers:
    """What a proxy knows of the others.

    Attributes:
        lanes: those of all.
        naming: the headers that name a trajectory.
        duties: what is done by whoever holds the first seat.
        cleaned, knows: see `http.siblings.Others`; the application sets them.
        keeps_headers: replies have no headers of the server's own.
    """

    seats: Seats
    naming: Sequence[str] = (TRAJECTORY_HEADER,)
    duties: list[Duty] = field(default_factory=list)
    keeps_headers: bool = False
    cleaned: Callable[[str], str] = str
    knows: Callable[[str], bool] = field(default=lambda reply_id: False)
    bus: PeerBus = field(init=False)

    def __post_init__(self) -> None:
        self.bus = PeerBus(self.seats)
        self.bus.on(KNOWS, self._knows)

    @property
    def lanes(self) -> Sequence[str]:
        """The lanes of all."""
        return self.seats.lanes

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at the others while the context lasts."""
        async with first_does(self.seats, self.duties):
            watching = asyncio.create_task(self.seats.watch())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        await self.seats.close()

    # Whose it is ----------------------------------------------------------------------------------

    def whose(self, name: str) -> To | None:
        """Where a trajectory of that name belongs."""
        live = self.seats.recorder.trajectories.get(name)
        if live is not None and not live.finished:
            if live.lane == self.seats.recorder.lane:
                return None
            writer = self.seats.writer_of(live.lane)
            if writer is not None:
                return To(writer, "writer")
        return self._at_seat(owner_of(name, len(self.seats.wire.addresses)))

    def _at_seat(self, seat: int) -> To | None:
        return None if seat in self.seats.place.holds else To(seat, "holder")

    def of_head(self, method: str, raw_path: str, headers: list[tuple[bytes, bytes]]) -> Whose | None:
        """Says where a request belongs, if its head does."""
        if moves_cursor(method, raw_path):
            return lambda: self._at_seat(FIRST)
        name, is_hint = named_by_head(method, raw_path, headers, self.naming)
        if name is None:
            return None
        meant = self.cleaned(name) if is_hint else name
        return lambda: self.whose(meant)

    def check_name(self, request: Request, name: str, raw: bytes, *, plain: bool = True) -> None:
        """See that a trajectory is this proxy's.

        Raises:
            PassOnError: it is another one's.
        """
        if self._belongs(request, self.whose(name)):
            return
        raise PassOnError(lambda: self.whose(name), raw, plain=plain)

    @staticmethod
    def _belongs(request: Request, to: To | None) -> bool:
        """Whether a request is to be answered here."""
        return to is None or request.scope.get(SENT_AS) in ("writer", "knower")

    async def check_unnamed(
        self, request: Request, reply_ids: Sequence[str], raw: bytes, *, plain: bool = True, kept: bool = True
    ) -> None:
        """See that a request without a name is this proxy's: see `Siblings`.

        Raises:
            PassOnError: it is another one's.
        """
        if request.scope.get(SENT_AS):
            return
        known, number = await knower_of(reply_ids, self.knows, self.bus)
        if number is not None:
            found = To(number, "knower")
            raise PassOnError(lambda: found, raw, plain=plain)
        if not known and kept and self._at_seat(FIRST) is not None:
            raise PassOnError(lambda: self._at_seat(FIRST), raw, plain=plain)

    async def _knows(self, _: int, __: int, asked: Json) -> tuple[Json, bytes]:
        return {"knows": self.knows(asked["reply"])}, b""

    # Sending it on --------------------------------------------------------------------------------

    async def sent_on(self, request: Request, whose: Whose, raw: bytes, *, plain: bool) -> Response | None:
        """The reply of the proxy that a request belongs to; None: it belongs here by now.

        Raises:
            ProxyAwayError: that one does not answer, and nobody stands in for it.
        """
        to = whose()
        if to is not None and to.role == "holder" and request.scope.get(SENT_AS) == "holder":
            return Response(status_code=421, headers={MOVED_HEADER: str(to.number)})
        watch, until = ClientWatch(request.receive), time.monotonic() + PATIENCE_S
        try:
            reply = await watch.race(self._reply(request, whose, raw, plain=plain, until=until))
        except ClientGone:
            watch.close()
            return Response(status_code=499)
        except BaseException:
            watch.close()
            raise
        if reply is None:
            watch.close()
            return None
        return _SentOn(reply, watch, frozenset() if self.keeps_headers else _OF_THE_SERVER)

    async def _reply(
        self, request: Request, whose: Whose, raw: bytes, *, plain: bool, until: float
    ) -> aiohttp.ClientResponse | None:
        while (to := whose()) is not None:
            number = self.seats.holder(to.number) if to.role == "holder" else to.number
            if number is not None:
                try:
                    reply = await self._send(request, number, to, raw, plain=plain)
                except aiohttp.ClientConnectorError:
                    pass  # it never got there
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    raise ProxyAwayError(number) from error
                else:
                    if MOVED_HEADER not in reply.headers:
                        return reply
                    reply.close()
            if time.monotonic() > until:
                raise ProxyAwayError(to.number)
            await self.seats.looked(number, LOOK_S)
        return None

    async def _send(
        self, request: Request, number: int, to: To, raw: bytes, *, plain: bool
    ) -> aiohttp.ClientResponse:
        scope, wire = request.scope, self.seats.wire
        left_out = _NOT_SENT_ON | ({b"content-encoding"} if plain else set())
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in end_to_end(scope["headers"]):
            if name not in left_out and not name.startswith(b"sec-fetch-"):
                headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
        headers[TOKEN_HEADER], headers[SENT_AS_HEADER] = wire.token, to.role
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(wire.addresses[number] + target.decode("ascii"), encoded=True)
        return await wire.session.request(
            scope["method"], url, data=raw or None, headers=headers, allow_redirects=False
        )


class _SentOn(Response):
    """Sends another proxy's reply as it comes; a client that leaves ends the request there too."""

    def __init__(self, reply: aiohttp.ClientResponse, watch: ClientWatch, left_out: frozenset[bytes]) -> None:
        self._reply, self._watch, self._left_out = reply, watch, left_out
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(ClientGone, aiohttp.ClientError, OSError):
                await self._watch.race(self._sent(send))  # one that breaks off breaks off here, too
        finally:
            self._watch.close()
            self._reply.close()

    async def _sent(self, send: Any) -> None:
        headers = [(n, v) for n, v in end_to_end(self._reply.raw_headers) if n not in self._left_out]
        await send({"type": "http.response.start", "status": self._reply.status, "headers": headers})
        async for data in self._reply.content.iter_any():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
