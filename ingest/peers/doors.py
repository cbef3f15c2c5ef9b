"""Where proxies of a run meet the application: their own route, and requests that belong to another one."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.error_replies import error_reply
from rollbook.ingest.peers.asking import ProxyAwayError
from rollbook.ingest.peers.peers import SENT_AS, SENT_AS_HEADER, PassOnError, Peers
from rollbook.ingest.peers.wire import MESSAGE_BYTES, PREFIX, TOKEN_HEADER
from rollbook.store.errors import RequestError


def add_sending_on(app: FastAPI, peers: Peers, room: BodyRoom) -> None:
    """Have requests sent on that belong to another proxy. Add the guards after that: they come before it."""

    async def send_on(request: Request, error: Exception) -> Response:
        assert isinstance(error, PassOnError)
        try:
            reply = await peers.sent_on(request, error.whose, error.raw, plain=error.plain)
        except RequestError as away:
            return error_reply(request.url.path, away)
        # It belongs here by now: its client is to send it again, as the body was taken out of it.
        return reply or error_reply(request.url.path, ProxyAwayError(peers.seats.place.number))

    app.add_exception_handler(PassOnError, send_on)
    app.add_middleware(SendingOn, peers=peers, room=room)


class SendingOn:
    """ASGI middleware: a request whose head says that it is another proxy's goes there."""

    def __init__(self, app: Any, peers: Peers, room: BodyRoom) -> None:
        self._app, self._peers, self._room = app, peers, room

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with what the other one answers, or have the application answer."""
        whose = None
        if scope["type"] == "http" and scope.get(SENT_AS) not in ("writer", "knower"):
            raw_path = scope["raw_path"].decode("latin-1")
            whose = self._peers.of_head(scope["method"], raw_path, scope["headers"])
        if whose is None or whose() is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            async with self._room.body(request) as raw:
                reply = await self._peers.sent_on(request, whose, raw, plain=False)
                if reply is not None:
                    await reply(scope, receive, send)
                    return
            await self._app(scope, _again(raw, receive), send)
        except (RequestError, ClientDisconnect) as error:
            await error_reply(scope["path"], error)(scope, receive, send)


def _again(raw: bytes, receive: Any) -> Any:
    """ASGI's `receive` of a request whose body has been read."""
    given = False

    async def body() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return body


class OfPeers:
    """ASGI middleware: answers other proxies, and knows what they send on. The first of all."""

    def __init__(self, app: Any, peers: Peers) -> None:
        self._app, self._peers = app, peers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or have the application answer, which finds in the scope as what a request was sent."""
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
        body = await self._peers.bus.answer(scope["path"].removeprefix(PREFIX), orjson.loads(raw))
        await Response(body, media_type="application/json")(scope, receive, send)


def add_peers(app: FastAPI, peers: Peers) -> None:
    """Have an application answer the other proxies. Add this last."""
    app.add_middleware(OfPeers, peers=peers)
