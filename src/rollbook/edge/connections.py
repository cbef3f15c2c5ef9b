"""Bounds of connections: their number, the size and pace of a request's head, how long they may be
idle.

uvicorn's protocol does the rest. httptools itself bounds nothing; uvicorn's `limit_concurrency`
counts connections that do nothing, refuses the newest connection, and does not answer in the
API's form.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import sys
import termios
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rollbook.edge.errors import openai_error

HEAD_BYTES = 64 << 10
MOST_HEADERS = 128
URL_BYTES = 16 << 10
HEAD_S = 20.0
"""Longest time for a request's head, from its first byte or from the connection."""
LINGER_S = 10.0
"""How long the rest of a body is discarded after an early answer, so that the client can read the answer."""
TAKE_S = 60.0
"""A client that takes no byte of its reply for this long counts as gone."""
READ_BYTES = 32 << 10
MOST_PIPELINED = 8
SHARE = 0.75
"""The share of all connections that one address may have."""
RESERVED, MOST_CONNECTIONS = 256, 8192
"""Descriptors that are kept for files, and the most connections that are of use."""


def raise_descriptors() -> int:
    """Raise the limit of descriptors as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return MOST_CONNECTIONS * 2 if hard == resource.RLIM_INFINITY else hard


def connections_for(descriptors: int, each: int, wanted: int | None) -> int:
    """How many connections there may be at once. Pure.

    Args:
        descriptors: how many the system gives.
        each: how many a connection may need: itself, and one to an engine.
    """
    most = max((descriptors - min(RESERVED, descriptors // 4)) // each, 1)
    return min(most, MOST_CONNECTIONS if wanted is None else wanted)


class Idle(OrderedDict[Any, None]):
    """Idle connections, the longest idle first."""

    def put(self, connection: Any) -> None:
        """Note a connection that is idle from now on."""
        self[connection] = None
        self.move_to_end(connection)


@dataclass(slots=True, eq=False)
class _Address:
    """The connections of one address, and which of them are idle."""

    count: int = 0
    fresh: Idle = field(default_factory=Idle)
    kept: Idle = field(default_factory=Idle)


class Connections:
    """All connections of a server.

    Beyond the bounds, the connection that has been idle longest is closed for a new one: first of those that
    never sent a request, then of those kept alive. A new one is refused only where all are busy.

    Args:
        most: how many there may be.
        refused: called with the code of each refusal.
    """

    def __init__(self, most: int, refused: Callable[[str], None] = lambda code: None) -> None:
        self.refused = refused
        self._most, self._share = most, max(int(most * SHARE), 1)
        self._count = 0
        self._fresh, self._kept = Idle(), Idle()
        self._addresses: dict[str, _Address] = {}

    def made(self, connection: Any, address: str) -> str | None:
        """Admit a connection; returns the code of a refusal, or None."""
        known = self._addresses.setdefault(address, _Address())
        refused = None
        if known.count >= self._share and not self._close_one(known.fresh, known.kept):
            refused = "too_many_connections"
        elif self._count >= self._most and not self._close_one(self._fresh, self._kept):
            refused = "connections_exhausted"
        known.count += 1
        self._count += 1
        if refused is None:
            known.fresh.put(connection)
            self._fresh.put(connection)
        return refused

    def _close_one(self, *idle: Idle) -> bool:
        victim = next((next(iter(some)) for some in idle if some), None)
        if victim is None:
            return False
        self.busy(victim, victim.address)
        self.refused("idle_connection_closed")
        victim.give_up()
        return True

    def busy(self, connection: Any, address: str) -> None:
        """Note that a connection's request has arrived."""
        known = self._addresses[address]
        for idle in (self._fresh, self._kept, known.fresh, known.kept):
            idle.pop(connection, None)

    def kept(self, connection: Any, address: str) -> None:
        """Note that a connection's request was answered; another may come."""
        self._kept.put(connection)
        self._addresses[address].kept.put(connection)

    def lost(self, connection: Any, address: str) -> None:
        """Note that a connection has ended."""
        known = self._addresses[address]
        self.busy(connection, address)
        known.count -= 1
        self._count -= 1
        if not known.count:
            del self._addresses[address]


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol, whose heads and waits are bounded."""

    places: Connections
    address = ""
    _head = 0
    _timer: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None
    _whole = True
    _refused = False
    _unsent = _body = _framing = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = _network(self.client[0]) if self.client else ""
        code = self.places.made(self, self.address)
        if code is not None:
            self._refuse(
                503 if code == "connections_exhausted" else 429, code, "too many connections are open"
            )
            return
        self._wait(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.lost(self, self.address)
        for timer in (self._timer, self._taking):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before, self._head = self._body, self._head + len(data)
        in_body = not self._whole
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if not self._whole:
            self._check_framing(len(data) - (self._body - before) if in_body else 0)
        elif self._head > HEAD_BYTES:
            self._too_large("head_too_large", 431, f"the request's head is larger than {HEAD_BYTES} bytes")
        elif self._timer is None and self._head:
            self._wait(HEAD_S, self._head_is_late)

    def _check_framing(self, size: int) -> None:
        """Count bytes within a body that are not part of it: chunk sizes and trailers."""
        self._framing += size
        if self._framing > HEAD_BYTES + self._body:
            self._too_large("head_too_large", 431, "the body's chunks are tiny, or its trailers large")
        elif self.cycle.body and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the application asks for more

    # The head ---------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._too_large("url_too_long", 414, f"the address is longer than {URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._whole:
            return  # a trailer, which is ignored
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._too_large("too_many_headers", 431, f"the request has more than {MOST_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._too_large("head_too_large", 431, f"the request's head is larger than {HEAD_BYTES} bytes")
        elif len(self.pipeline) >= MOST_PIPELINED:
            self._too_large(
                "too_many_pipelined", 429, f"more than {MOST_PIPELINED} requests wait for replies"
            )
        if self._refused:
            return
        self._stop_waiting()
        self._whole, self._body, self._framing = False, 0, 0
        self.places.busy(self, self.address)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        self._whole, self._head = True, 0
        self._stop_waiting()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The request was answered before its body was complete.
            self.places.kept(self, self.address)
            self._wait(self.timeout_keep_alive, self.transport.close)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait(TAKE_S, self.transport.abort)
        elif not self._whole:
            self._wait(LINGER_S, self.transport.close)
        elif not self.pipeline and self.cycle.response_complete:
            self.places.kept(self, self.address)

    def _head_is_late(self) -> None:
        if not self._head and self.cycle is None:
            self.places.refused("idle_connection_closed")
            self.transport.close()
            return
        text = f"the request's head did not come within {HEAD_S:g} s: send it at once"
        self._refuse(408, "head_too_slow", text)

    # Refusals ---------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the API's form."""
        if not self._refused:
            self._refuse(400, "bad_http", f"{msg} Send HTTP/1.1.")

    def _too_large(self, code: str, status: int, text: str) -> None:
        if not self._refused:
            self._refuse(status, code, f"{text}: send less")

    def _refuse(self, status: int, code: str, text: str) -> None:
        """Answer in place of the application, unless it is answering, and close."""
        self._refused = True
        self.places.refused(code)
        if self.cycle is None or self.cycle.response_complete:
            body = orjson.dumps(openai_error(status, code, text))
            head = [
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"x-should-retry: %s" % (b"true" if status in (408, 429, 503) else b"false"),
                b"connection: close",
            ]
            self.transport.write(STATUS_LINE[status] + b"\r\n".join(head) + b"\r\n\r\n" + body)
            self._wait(LINGER_S, self.transport.abort)
        self.transport.close()

    def give_up(self) -> None:
        """Close this connection to make room for another."""
        self._refused = True
        self.transport.close()

    # Waiting ----------------------------------------------------------------------------------

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = _unsent(self.transport)
        self._taking = self.loop.call_later(TAKE_S, self._look_whether_taken)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _look_whether_taken(self) -> None:
        unsent, before = _unsent(self.transport), self._unsent
        if unsent >= before:
            self.places.refused("reply_not_taken")
            self.transport.abort()
            return
        self._unsent = unsent
        self._taking = self.loop.call_later(TAKE_S, self._look_whether_taken)


class BoundedHttp(asyncio.BufferedProtocol):
    """Reads a connection in pieces of `READ_BYTES`, and at first no more than one of each request.

    Without this, one read takes everything that the system has buffered, a quarter of a
    megabyte, before anything can refuse it.
    """

    def __init__(self, http: LimitedHttp) -> None:
        self._http = http
        self._buffer = memoryview(_BUFFER)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection was made."""
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was lost or closed."""
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing: the client takes bytes more slowly than they are sent."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Write again: the client has caught up."""
        self._http.resume_writing()

    def eof_received(self) -> None:
        """The client sends nothing more."""
        self._http.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of the next read: shared by all, as its bytes are taken out at once."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """This many bytes were read."""
        self._http.data_received(bytes(self._buffer[:nbytes]))


_BUFFER = bytearray(READ_BYTES)


def bounded_http(places: Connections) -> Callable[..., asyncio.BufferedProtocol]:
    """The factory of protocols, for uvicorn's option `http`."""

    def make(**options: Any) -> asyncio.BufferedProtocol:
        http = LimitedHttp(**options)
        http.places = places
        return BoundedHttp(http)

    return make


def _unsent(transport: Any) -> int:
    """Bytes that the client has not taken yet: those in the transport, and those in the system,
    which buffers megabytes."""
    size: int = transport.get_write_buffer_size()
    try:
        unsent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return size + int.from_bytes(unsent, sys.byteorder)
    except OSError:  # a system without this call
        return size


def _network(host: str) -> str:
    """The address to count: for IPv6 the network, since everybody has 2**64 addresses in one."""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return str(IPv6Address(int(IPv6Address(host.partition("%")[0])) >> 64 << 64))
