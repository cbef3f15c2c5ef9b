"""Connects an application with the other processes that record its run, if any: workers or proxies.

The HTTP side of proxies of a run: their own route, and forwarding of requests that belong to
another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.errors import error_reply
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.cluster.messages import MESSAGE_BYTES, PREFIX, TOKEN_HEADER, answer_of
from rollbook.ingest.cluster.peers import SENT_AS, SENT_AS_HEADER, PassOnError, Peers, Whose
from rollbook.ingest.cluster.shared_connections import fields_with
from rollbook.ingest.cluster.siblings import Siblings
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.recording.metrics import Metrics
from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import Json

Cluster = Siblings | Peers


def join(
    app: FastAPI,
    others: Cluster | None,
    cleaned: Callable[[str], str],
    knows: Callable[[str], bool],
    room: BodyBudget,
    metrics: Metrics,
) -> None:
    """Let the others know what this one knows, and have what is another proxy's sent on.

    Args:
        cleaned: takes secrets out of a text.
        knows: whether a reply, by its id, is known here.
    """
    if others is not None:
        others.cleaned, others.knows = cleaned, knows
    if isinstance(others, Peers):
        add_forwarding(app, others, room, counted(metrics.failed, metrics.refused))


def add_all_guards(
    app: FastAPI, others: Cluster | None, own: AllowedHosts, guard: Guard, metrics: Metrics
) -> None:
    """Put before every route whatever comes before it. Add this last."""
    add_guards(app, guard, own, metrics.failed, error_body)
    if isinstance(others, Peers):
        app.add_middleware(OfPeers, peers=others)


def stops(app: FastAPI, others: Cluster | None, *more: Callable[[], None]) -> None:
    """Let the server tell all who keep requests waiting when the application is to end."""
    of_peers = (others.stop,) if isinstance(others, Peers) else ()

    def stop() -> None:
        for callback in (*of_peers, *more):
            callback()

    app.state.stop = stop


@asynccontextmanager
async def meeting(others: Cluster | None) -> AsyncIterator[None]:
    """Speak with the others while the context lasts."""
    if isinstance(others, Peers):
        async with others.running():
            yield
    elif others is not None:
        with others.bus.running():
            yield
    else:
        yield


def health(others: Cluster | None) -> Json:
    """What /healthz says of other proxies; of other workers `aggregate` does."""
    return {"proxies": others.seats.states()} if isinstance(others, Peers) else {}


logger = logging.getLogger(__name__)

_OF_ROUTING = frozenset({"path_params", "endpoint", "route", "router"})


def add_forwarding(app: FastAPI, peers: Peers, room: BodyBudget, failed: Callable[[Exception], None]) -> None:
    """Add the middleware that forwards requests which belong to another proxy.

    Add the guards after it, so that they come before it.

    Args:
        failed: called with the error of each that is not answered.
    """

    async def send_on(request: Request, error: Exception) -> Response:
        assert isinstance(error, PassOnError)
        try:
            reply = await peers.sent_on(request, error.whose, error.raw, plain=error.plain)
        except RequestError as away:
            failed(away)
            return error_reply(request.url.path, away, error_body)
        return reply or _Here(app, error.raw, plain=error.plain)

    app.add_exception_handler(PassOnError, send_on)
    app.add_middleware(ForwardingMiddleware, peers=peers, room=room, failed=failed)


class ForwardingMiddleware:
    """ASGI middleware: a request whose head says that it is another proxy's goes there."""

    def __init__(self, app: Any, peers: Peers, room: BodyBudget, failed: Callable[[Exception], None]) -> None:
        self._app, self._peers, self._room, self._failed = app, peers, room, failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with what the other one answers, or have the application answer."""
        whose = None
        if scope["type"] == "http" and scope.get(SENT_AS) != "knower":
            raw_path = scope["raw_path"].decode("latin-1")
            whose = self._peers.of_head(scope["method"], raw_path, scope["headers"])
        if whose is None or whose() is None:
            await self._app(scope, receive, send)
            return
        try:
            reply, raw = await self._sent_on(Request(scope, receive), whose)
        except (RequestError, ClientDisconnect) as error:
            self._failed(error)
            await error_reply(scope["path"], error, error_body)(scope, receive, send)
            return
        if reply is None:
            await self._app(scope, _again(raw, receive), send)
        else:
            await reply(scope, receive, send)

    async def _sent_on(self, request: Request, whose: Whose) -> tuple[Response | None, bytes]:
        """(the reply, or None where the request belongs here by now; its body)

        The body has its room until the other proxy has it, which then has room for it.
        """
        sent = asyncio.Event()
        async with self._room.body(request) as raw:
            work = self._peers.sent_on(request, whose, raw, plain=False, on_sent=sent.set)
            replying, arrived = asyncio.ensure_future(work), asyncio.ensure_future(sent.wait())
            try:
                await asyncio.wait({replying, arrived}, return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                replying.cancel()
                raise
            finally:
                arrived.cancel()
        return await replying, raw


class _Here(Response):
    """Has the application answer a request whose body was read: it has become this proxy's meanwhile."""

    def __init__(self, app: Any, raw: bytes, *, plain: bool) -> None:
        self._app, self._raw, self._plain = app, raw, plain
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As if it had just come."""
        headers = fields_with(scope["headers"], self._raw, plain=self._plain)
        again = {key: value for key, value in scope.items() if key not in _OF_ROUTING}
        await self._app(again | {"headers": headers}, _again(self._raw, receive), send)


def _again(raw: bytes, receive: Any) -> Any:
    """ASGI's `receive` of a request whose body has been read."""
    delivered = False

    async def body() -> Any:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return body


class OfPeers:
    """ASGI middleware: answers other proxies, and knows what they send on. The first of all."""

    def __init__(self, app: Any, peers: Peers) -> None:
        self._app, self._peers = app, peers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or have the application answer; the scope says in which role the request was forwarded."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        token = headers.get(TOKEN_HEADER)
        if token is not None and self._peers.seats.wire.knows(token):
            if scope["method"] == "POST" and scope["path"].startswith(PREFIX):
                await self._answer(scope, receive, send)
                return
            scope[SENT_AS] = headers.get(SENT_AS_HEADER)
        await self._app(scope, receive, send)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        raw = b""
        async for part in Request(scope, receive).stream():
            raw += part
            if len(raw) > MESSAGE_BYTES:
                await Response(status_code=413)(scope, receive, send)
                return
        status = 200
        try:
            body = await self._peers.bus.answer(scope["path"].removeprefix(PREFIX), bytes(raw))
        except RequestError as error:
            logger.warning("rollbook: a message that has the proxies' token is refused: %s", error.message)
            status, body = error.status, answer_of(error)
        await Response(body, status, media_type="application/json")(scope, receive, send)


def counted(
    failed: Callable[[BaseException], None], refused: Callable[[str], None]
) -> Callable[[Exception], None]:
    """A callback that counts the error of a request that is not forwarded, as it is counted elsewhere."""

    def count(error: Exception) -> None:
        if isinstance(error, LimitError):
            refused(error.code)
        failed(error)

    return count
