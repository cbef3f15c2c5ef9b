"""Connections of a proxy of several workers: each goes to the worker that a request on it is for.

A worker reads the head of a request. If the request is another worker's, that one gets the
connection itself with what was read of it, and goes on with it. That is possible while no reply is
due on it, so a request that came before its predecessor was answered is kept as bytes until then.
What only a body tells is learned in the application, which then gives the connection away with the
whole request.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import httptools
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import FlowControl

from rollbook.edge.connections import READ_BYTES, BoundedHttp, Connections, LimitedHttp
from rollbook.edge.errors import error_reply
from rollbook.ingest.cluster.bus import AwayError, Bus
from rollbook.ingest.endpoints.registry import error_body
from rollbook.store.events import Json

CONNECTION = "rollbook.connection"
"""The key under which a request's scope holds its connection."""
SETTLED = "rollbook.settled"
"""The key that says whether another worker found that the request is this one's."""
FLUSH_S = 0.002
"""Pause before looking again whether an earlier reply has left this process."""
_END = b"\r\n\r\n"
_OF_THE_BODY = frozenset({b"content-length", b"transfer-encoding", b"expect"})


class Neighbours(Protocol):
    """What a connection asks about requests."""

    bus: Bus

    def of_head(self, method: str, raw_path: str, headers: list[tuple[bytes, bytes]]) -> int | None:
        """The worker that a request is for, if its head says so and it is another one."""


class _Flow(FlowControl):
    """uvicorn's, but bytes that were read already come before those of the transport."""

    def __init__(self, transport: Any, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def resume_reading(self) -> None:
        """Let more bytes come."""
        if self.read_paused:
            self.read_paused = False
            self._go_on()


class SharedHttp(LimitedHttp):
    """The bounded protocol, on a connection that may go to another worker.

    Attributes:
        unread: bytes of the connection that the parser has not seen.
        settled: whether the next request is this worker's, whatever its head says.
    """

    neighbours: Neighbours
    settled = False
    _to: int | None = None
    _left: int | None = 0
    """Bytes of the body to come; None: it is in chunks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unread = bytearray()
        self._seen = bytearray()
        """The head so far; of a body in chunks, its last bytes."""

    def connection_made(self, transport: Any) -> None:
        """Go on with what another worker read of it."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._read_on)
        if self.unread:
            self.loop.call_soon(self._go_on)

    def data_received(self, data: bytes) -> None:
        """Parse as much as may be parsed now."""
        if self._refused:
            return
        self.unread += data
        self._parse()

    # Parsing, request by request ---------------------------------------------------------------

    @property
    def _due(self) -> bool:
        """Whether a reply is due."""
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        while self.unread and not self._refused and not self.transport.is_closing():
            if self._whole and self._due:
                self.flow.pause_reading()  # the next request waits for the end of this one
                return
            if not self._whole and self.flow.read_paused:
                return
            size = self._size_of_head() if self._whole else self._size_of_body()
            part = bytes(self.unread[:size])
            del self.unread[:size]
            super().data_received(part)
            if self._to is not None:
                self._give(self._to, bytes(self._seen + self.unread))
                return

    def _size_of_head(self) -> int:
        """How many bytes belong to the head that is being read."""
        start = max(len(self._seen) - len(_END) + 1, 0)
        before = len(self._seen)
        self._seen += self.unread[:READ_BYTES]
        end = self._seen.find(_END, start)
        if end >= 0:
            del self._seen[end + len(_END) :]
        return len(self._seen) - before

    def _size_of_body(self) -> int:
        """How many bytes are no more than the rest of the body."""
        most = min(len(self.unread), READ_BYTES)
        if self._left is not None:
            return min(most, max(self._left, 1))
        # A body in chunks ends with an empty line, and has empty lines perhaps.
        end = (self._seen + self.unread[:most]).find(_END)
        size = most if end < 0 else end + len(_END) - len(self._seen)
        self._seen = (self._seen + self.unread[:size])[1 - len(_END) :] if end < 0 else bytearray()
        return size

    def on_message_begin(self) -> None:
        """Have the application find the connection."""
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """See whose the request is."""
        if self._refused:
            return
        if not self.settled:
            self._to = self._other()
            if self._to is not None:
                self._stop_waiting()
                return
        self.scope[SETTLED] = self.settled  # type: ignore[literal-required]
        self.settled = False
        fields = dict(self.headers)
        chunks = b"transfer-encoding" in fields
        self._left = None if chunks else int(fields.get(b"content-length", b"0") or b"0")
        self._seen = bytearray()
        super().on_headers_complete()

    def _other(self) -> int | None:
        try:
            path = httptools.parse_url(self.url).path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            return None  # is answered with an error
        return self.neighbours.of_head(self.parser.get_method().decode("ascii"), path, self.headers)

    def on_body(self, body: bytes) -> None:
        """Count what is still to come."""
        if self._left is not None:
            self._left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request that is another worker's is no message here."""
        if self._to is None:
            self._seen = bytearray()
            super().on_message_complete()

    def _read_on(self) -> None:
        """Parse what is there before more is read."""
        if self.unread:
            self.loop.call_soon(self._go_on)
        elif not self._refused:
            self.transport.resume_reading()

    def _go_on(self) -> None:
        self._parse()
        over = self._refused or self.transport.is_closing()
        if not self.unread and not self.flow.read_paused and not over:
            self.transport.resume_reading()

    # Giving it away -----------------------------------------------------------------------------

    def give_whole(self, to: int, request: bytes) -> bool:
        """Give the connection away with the request that is being answered; whether that was possible.

        Args:
            request: all of it, as it would have been sent.
        """
        if not self._whole or self.cycle is None or self.cycle.response_started:
            return False
        self.cycle.disconnected = True  # for uvicorn: no reply comes from here
        self._give(to, request + bytes(self.unread), settled=True)
        return True

    def _give(self, to: int, data: bytes, *, settled: bool = False) -> None:
        """Give the connection away, once an earlier reply has left this process."""
        self._refused = True  # whatever comes is not for this worker
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.flow.pause_reading()
            self.loop.call_later(FLUSH_S, lambda: self._give(to, data, settled=settled))
            return
        try:
            fd = os.dup(self.transport.get_extra_info("socket").fileno())
            words = {"is": "connection", "settled": settled}
            self.neighbours.bus.send(to, words, data, fd)
        except (AwayError, OSError) as error:
            self._refused, self.cycle = False, None  # type: ignore[assignment]
            code = error.code if isinstance(error, AwayError) else "short"
            self._refuse(503, code, f"{error}")
            return
        self.transport.abort()  # closes this worker's descriptor, not the connection


def shared_http(places: Connections, neighbours: Neighbours) -> Callable[..., BoundedHttp]:
    """The factory of protocols, for uvicorn's option `http`."""

    def make(unread: bytes = b"", settled: bool = False, **options: Any) -> BoundedHttp:
        http = SharedHttp(**options)
        http.places, http.neighbours = places, neighbours
        http.unread += unread
        http.settled = settled
        return BoundedHttp(http)

    return make


def take_connections(server: Any, neighbours: Neighbours) -> None:
    """Have a uvicorn server go on with the connections that other workers give away."""

    async def go_on(fd: int, words: Json, data: bytes) -> None:
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        make = server.config.http_protocol_class
        options = {"config": server.config, "server_state": server.server_state}
        options |= {"app_state": server.lifespan.state, "settled": words["settled"], "unread": data}
        try:
            await server_loop.connect_accepted_socket(lambda: make(**options), connection)
        except OSError:
            connection.close()  # the client has left

    def taken(fd: int, words: Json, data: bytes) -> None:
        task = server_loop.create_task(go_on(fd, words, data))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    tasks: set[Any] = set()
    server_loop: Any = asyncio.get_running_loop()
    neighbours.bus.on_connection = taken


# In the application -----------------------------------------------------------------------------


class ElsewhereError(Exception):
    """A request turns out to be another worker's, now that its body is read.

    Attributes:
        raw: the body.
        plain: whether that is without its content encoding.
    """

    def __init__(self, to: int, raw: bytes, *, plain: bool = True) -> None:
        super().__init__(to)
        self.to, self.raw, self.plain = to, raw, plain


async def give_away(request: Request, error: Exception) -> Response:
    """The handler of `ElsewhereError`: a reply that gives the connection away instead of replying."""
    assert isinstance(error, ElsewhereError)
    return _GivenAway(error)


class _GivenAway(Response):
    def __init__(self, error: ElsewhereError) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        connection: SharedHttp = scope[CONNECTION]
        request = as_sent(scope, self._error.raw, plain=self._error.plain)
        if not connection.give_whole(self._error.to, request):
            await error_reply(scope["path"], AwayError(self._error.to), error_body)(scope, receive, send)


def as_sent(scope: Any, raw: bytes, *, plain: bool) -> bytes:
    """A request as its client would have sent it with this body at once. Pure.

    Args:
        plain: the body is without its content encoding.
    """
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%s %s HTTP/%s" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%s: %s" % field for field in fields_with(scope["headers"], raw, plain=plain)]
    return b"\r\n".join([*lines, b"", b""]) + raw


def fields_with(
    headers: Sequence[tuple[bytes, bytes]], raw: bytes, *, plain: bool
) -> list[tuple[bytes, bytes]]:
    """The headers of a request whose body is sent at once. Pure.

    Args:
        plain: the body is without its content encoding.
    """
    left_out = _OF_THE_BODY | ({b"content-encoding"} if plain else set())
    kept = [field for field in headers if field[0] not in left_out]
    return [*kept, (b"content-length", b"%d" % len(raw))]
