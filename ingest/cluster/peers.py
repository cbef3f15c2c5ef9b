"""Sends each request to the proxy, of those of a run, that it belongs to.

A trajectory that is open belongs to the proxy whose lane it is in. A name that is new, or whose
trajectory has ended, belongs to whoever holds the seat that it falls to. A request for another
proxy's trajectory is forwarded to that one, whole, and its reply comes back as it is made.

Proxies ask whoever holds a seat, as workers of one proxy ask each other. The one with the first
seat has duties for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import unquote

import aiohttp
from multidict import CIMultiDict
from starlette.requests import Request
from starlette.responses import Response
from yarl import URL

from rollbook.edge.errors import ENDING_HEADER
from rollbook.edge.forwarding import MADE_ANEW, end_to_end, header_value
from rollbook.edge.requests import ClientGone, ClientWatch
from rollbook.ingest.access import ROUTES, RULES
from rollbook.ingest.admission.gate import ANSWERED_S
from rollbook.ingest.cluster.bus import Handler
from rollbook.ingest.cluster.messages import (
    GIVE_BACK,
    HOLDS,
    TOKEN_HEADER,
    MovedError,
    UnreachableError,
    answer_of,
    check_question,
    read_message,
)
from rollbook.ingest.cluster.shard_leases import LOOK_S, ShardLeases, look_again
from rollbook.ingest.cluster.shared_connections import ElsewhereError
from rollbook.ingest.cluster.siblings import KNOWS, first_known, knower_of, moves_cursor, named_by_head
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.settings import TRAJECTORY_HEADER
from rollbook.ingest.trajectories.place import FIRST, owner_of
from rollbook.store.errors import EndingError, RequestError
from rollbook.store.events import Json

SENT_AS_HEADER, MOVED_HEADER = "x-rollbook-sent-as", "x-rollbook-moved"
SENT_AS = "rollbook.sent_as"
"""The key under which a request's scope says as what another proxy sent it here."""
MOVED = 421
"""The status of an answer that says with `MOVED_HEADER` that a request is another proxy's."""
PART_BYTES = 256 << 10
"""Of a body, so much is sent at once."""
PATIENCE_S = 20.0
"""So long a request waits for a proxy that is gone to be stood in for."""
_NOT_SENT_ON = MADE_ANEW | {TOKEN_HEADER.encode(), SENT_AS_HEADER.encode(), b"origin", b"referer"}
"""Where a page is from was checked by the proxy that it asked."""
_OF_THE_SERVER = frozenset({b"date", b"server"})

_ABOUT_TRAJECTORIES = frozenset(
    {"/t/{said:path}", "/v1/{path:path}"}
    | {rule.path for rule in RULES if rule.path.startswith("/v1/trajectories/")}
)
"""Paths whose requests may name a trajectory by their heads."""

As = Literal["holder", "writer", "knower"]
Reply = aiohttp.ClientResponse


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request belongs.

    Attributes:
        number: of a seat, or of a proxy.
        role: as which the destination gets the request: holder of the seat; writer of the trajectory;
            or the one that knows a reply, or keeps what names nothing, and is not to ask again.
        name: of the trajectory, where one writes it.
    """

    number: int
    role: As
    name: str = ""


Whose = Callable[[], Destination | None]
"""Says where a request belongs as far as is known now; None: here."""


class PassOnError(ElsewhereError):
    """A request turns out to be another proxy's, now that its body is read."""

    def __init__(self, whose: Whose, raw: bytes, *, plain: bool = True) -> None:
        to = whose()
        super().__init__(-1 if to is None else to.number, raw, plain=plain)
        self.whose = whose


@dataclass(slots=True, eq=False)
class Peers:
    """What a proxy knows of the others.

    Attributes:
        naming: the headers that name a trajectory.
        duties: what is done by whoever holds the first seat.
        cleaned, knows: see `RequestRouter`; the application sets them.
        keeps_headers: replies have no headers of the server's own.
    """

    seats: ShardLeases
    naming: Sequence[str] = (TRAJECTORY_HEADER,)
    duties: list[Duty] = field(default_factory=list)
    keeps_headers: bool = False
    cleaned: Callable[[str], str] = str
    knows: Callable[[str], bool] = field(default=lambda reply_id: False)
    bus: PeerBus = field(init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once other proxies' answers are not waited for any more."""

    def __post_init__(self) -> None:
        self.bus = PeerBus(self.seats)
        self.bus.on(KNOWS, self._knows)

    @property
    def lanes(self) -> Sequence[str]:
        """The lanes of all."""
        return self.seats.wire.lanes

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
        await self.seats.wire.close()

    # Whose it is ----------------------------------------------------------------------------------

    def whose(self, name: str) -> Destination | None:
        """Where a trajectory of that name belongs. Who writes it is for the holder of its seat to say."""
        live = self.seats.recorder.trajectories.get(name)
        is_open = live is not None and not live.finished
        if live is not None and is_open and live.lane == self.seats.recorder.lane:
            return None
        to = self._at_seat(owner_of(name, len(self.seats.wire.addresses)))
        if to is None and live is not None and is_open:
            writer = self.seats.writer_of(live.lane)
            return None if writer is None else Destination(writer, "writer", name)
        return to

    def _at_seat(self, seat: int) -> Destination | None:
        return None if seat in self.seats.place.holds else Destination(seat, "holder")

    def of_head(self, method: str, raw_path: str, headers: list[tuple[bytes, bytes]]) -> Whose | None:
        """Says where a request belongs, if its head does."""
        if moves_cursor(method, raw_path):
            return lambda: self._at_seat(FIRST)
        if ROUTES.of(method, unquote(raw_path)).path not in _ABOUT_TRAJECTORIES:
            return None
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
        if self.whose(name) is not None and request.scope.get(SENT_AS) != "knower":
            raise PassOnError(lambda: self.whose(name), raw, plain=plain)

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
            destination = Destination(number, "knower")
            raise PassOnError(lambda: destination, raw, plain=plain)
        if not known and kept and self._at_seat(FIRST) is not None:
            raise PassOnError(lambda: self._at_seat(FIRST), raw, plain=plain)

    async def _knows(self, _: int, __: int, question: Json) -> tuple[Json, bytes]:
        return {"knows": first_known(question["replies"], self.knows)}, b""

    # Sending it on --------------------------------------------------------------------------------

    def stop(self) -> None:
        """This proxy is to end: the others have a while to answer what was sent on to them."""
        asyncio.get_running_loop().call_later(ANSWERED_S, self._ended.set)

    async def _until_ended(self, reply: Coroutine[Any, Any, Reply | None]) -> Reply | None:
        replying, ended = asyncio.ensure_future(reply), asyncio.ensure_future(self._ended.wait())
        try:
            both: set[asyncio.Future[Any]] = {replying, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not replying.done():
                raise EndingError
            return replying.result()
        finally:
            replying.cancel()
            ended.cancel()

    async def sent_on(
        self,
        request: Request,
        whose: Whose,
        raw: bytes,
        *,
        plain: bool,
        on_sent: Callable[[], None] = lambda: None,
    ) -> Response | None:
        """The reply of the proxy that a request belongs to; None: it belongs here by now.

        Args:
            on_sent: called once that one has all of the body.

        Raises:
            ProxyAwayError: that one does not answer, and nobody stands in for it.
            EndingError: this proxy ends, and that one takes too long.
        """
        to, sent_as = whose(), request.scope.get(SENT_AS)
        if to is not None and sent_as in (to.role, "writer"):
            return Response(status_code=MOVED, headers={MOVED_HEADER: str(to.number)})
        watch = ClientWatch(request.receive)
        call = _Call(self, request, whose, raw, plain, on_sent)
        try:
            reply = await watch.race(self._until_ended(call.reply()))
        except ClientGone:
            watch.close()
            return Response(status_code=499)
        except BaseException:
            watch.close()
            raise
        if reply is None:
            watch.close()
            return None
        left_out = frozenset() if self.keeps_headers else _OF_THE_SERVER
        return _SentOn(reply, watch, left_out, lambda: self.seats.gone(call.number))


@dataclass(slots=True, eq=False)
class _Call:
    """A request that is sent on.

    Attributes:
        number: the proxy that it was sent to last.
    """

    peers: Peers
    request: Request
    whose: Whose
    raw: bytes
    plain: bool
    on_sent: Callable[[], None]
    number: int = -1

    async def reply(self) -> aiohttp.ClientResponse | None:
        """The reply, once it begins; None: it belongs here by now.

        Raises:
            ProxyAwayError: see `Peers.sent_on`.
        """
        seats, until = self.peers.seats, time.monotonic() + PATIENCE_S
        while (to := self.whose()) is not None:
            number, reply = seats.holder(to.number) if to.role == "holder" else to.number, None
            if number is not None:
                reply = await self._asked(number, to)
            if reply is not None and not _is_moved(reply):
                return reply
            if time.monotonic() > until:
                raise ProxyAwayError(to.number)
            if to.role == "writer":
                await look_again(seats.recorder, to.name)
            if self.whose() == to:
                await seats.looked(number if reply is None else None, LOOK_S)
        return None

    async def _asked(self, number: int, to: Destination) -> aiohttp.ClientResponse | None:
        """The reply of a proxy; None: it has not got the request.

        Raises:
            ProxyAwayError: it has got it, perhaps, and is gone.
        """
        self.number = number
        with self.peers.seats.gone(number) as gone:
            sending = asyncio.ensure_future(self._send(number, to))
            try:
                both: set[asyncio.Future[Any]] = {sending, gone}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    raise ProxyAwayError(number)
                reply = sending.result()
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnreachableError):
                return None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ProxyAwayError(number) from error
            finally:
                sending.cancel()
        return reply

    async def _send(self, number: int, to: Destination) -> aiohttp.ClientResponse:
        scope, wire = self.request.scope, self.peers.seats.wire
        left_out = _NOT_SENT_ON | ({b"content-encoding"} if self.plain else set())
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in end_to_end(scope["headers"]):
            if name not in left_out and not name.startswith(b"sec-fetch-"):
                headers.add(name.decode("latin-1"), header_value(value))
        headers[TOKEN_HEADER], headers[SENT_AS_HEADER] = wire.token, to.role
        body = None
        if self.raw:
            headers["content-length"], body = str(len(self.raw)), self._parts()
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(wire.addresses[number] + target.decode("ascii"), encoded=True)
        return await wire.session.request(
            scope["method"], url, data=body, headers=headers, allow_redirects=False
        )

    async def _parts(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.raw), PART_BYTES):
            yield self.raw[start : start + PART_BYTES]
        self.on_sent()


def _is_moved(reply: aiohttp.ClientResponse) -> bool:
    """Whether a reply says that the request is another proxy's, or that its own is ending; it is done with
    then."""
    moved = ENDING_HEADER in reply.headers or (reply.status == MOVED and MOVED_HEADER in reply.headers)
    if moved:
        reply.close()
    return moved


class _SentOn(Response):
    """Sends another proxy's reply as it comes; a client that leaves ends the request there too."""

    def __init__(
        self,
        reply: aiohttp.ClientResponse,
        watch: ClientWatch,
        left_out: frozenset[bytes],
        gone: Callable[[], AbstractContextManager[asyncio.Future[None]]],
    ) -> None:
        self._reply, self._watch, self._left_out, self._gone = reply, watch, left_out, gone
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(ClientGone, aiohttp.ClientError, OSError), self._gone() as gone:
                gone.add_done_callback(lambda _: self._reply.close())
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
    """One proxy's end: see `Asks`; numbers are those of seats."""

    seats: ShardLeases
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
        """Ask the holder of a seat and return its answer. If the seat gets a new holder, that one is asked.

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
                    question = {"seat": to, "words": words or {}}
                    # One that is there no more may be waited for without end: it is asked again.
                    within = ASK_S if left is None else min(left, ASK_S)
                    answer = await self.seats.wire.post(holder, kind, question, within)
                    return answer["words"], b""
            except (UnreachableError, MovedError, TimeoutError):
                pass
            if until is not None and time.monotonic() >= until:
                raise ProxyAwayError(to)
            await self.seats.looked(holder, min(LOOK_S, left or LOOK_S))

    async def ask_all(self, kind: str, words: Json | None = None) -> dict[int, tuple[Json, bytes] | None]:
        """What each other proxy answers that can be reached, by number; None: it did not."""

        async def ask_one(number: int) -> tuple[Json, bytes] | None:
            if not self.seats.answers(number):
                return None
            with contextlib.suppress(UnreachableError, MovedError, RequestError):
                answer = await self.seats.wire.post(number, kind, {"seat": number, "words": words or {}})
                return answer["words"], b""
            return None

        others = self.seats.wire.others
        answers = await asyncio.gather(*map(ask_one, others))
        return dict(zip(others, answers, strict=True))

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
        if task.cancelled() or isinstance(task.exception(), EndingError):
            raise MovedError  # it was given up in the middle: who asks again asks whoever holds the seat then
        return task.result()

    async def answer(self, kind: str, raw: bytes) -> bytes:
        """The body of this proxy's answer to another one's POST.

        Raises:
            RequestError: 400, it has not the form of a question.
        """
        question = check_question(kind, read_message(raw), len(self.seats.wire.addresses))
        try:
            self.seats.met(question["from"], question["process"])
            if kind in (HOLDS, GIVE_BACK):
                return answer_of(await self.seats.answer(kind, question))
            words, _ = await self._answered(question["from"], question["seat"], kind, question["words"])
            return answer_of({"words": words})
        except (MovedError, RequestError) as error:
            return answer_of(error)
        except Exception as error:
            logger.exception("rollbook: a proxy's question %r failed", kind)
            return answer_of(RequestError(500, "internal_error", f"{type(error).__name__} in another proxy"))


class Duty(Protocol):
    """Something that one proxy does for all."""

    async def begin(self, runs: RunReader) -> None:
        """Do it from now on, beginning with what there is in the run."""

    async def end(self) -> None:
        """Another proxy does it from now on, or nobody."""


@contextlib.asynccontextmanager
async def first_does(seats: ShardLeases, duties: Sequence[Duty]) -> AsyncIterator[None]:
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
