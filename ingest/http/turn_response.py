"""Sends the reply to a request: whole or as server-sent events, to a client that may go away.

What streams out before the turn is durable is tokens only; the finish, the usage and the terminator are
withheld until it is. While nothing is ready, bytes without meaning keep the connection alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from rollbook.ingest.endpoints.api import StreamWriter
from rollbook.ingest.http.exchange import Exchange
from rollbook.ingest.http.options import KeepAlive
from rollbook.ingest.replies.family import Parsed
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.in_flight import InFlightCall


class TurnResponse(Response):
    """The reply to a request that is being answered.

    Args:
        exchange: the request and the client that waits.
        keep_alive: when bytes without meaning are sent.
    """

    def __init__(self, exchange: Exchange, keep_alive: KeepAlive) -> None:
        self._exchange, self._keep_alive = exchange, keep_alive
        self._in_flight, self._api = exchange.in_flight, exchange.api
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the reply. An error before the first byte is raised, so that the reply has its status."""
        client = _Client(receive, send, self._in_flight)
        woken = self._in_flight.listen()
        client.on_gone = woken.set
        try:
            if self._in_flight.call.stream:
                await self._stream(client, woken)
            else:
                await self._whole(client, woken)
        finally:
            client.close()
            self._exchange.left()
            if self._in_flight.leave(woken):
                await self._exchange.abort()

    async def _whole(self, client: _Client, woken: asyncio.Event) -> None:
        in_flight, done = self._in_flight, self._in_flight.done
        while not done.done() and not client.gone:
            woken.clear()
            if not await _wait(woken, self._keep_alive.whole_s):
                await client.body(b" ", self._head(None, "application/json"))
        if not done.done():
            return
        turns = done.result()
        reply = self._api.reply(in_flight.call, turns, in_flight.reader.tokenizer)
        await self._last(client, turns, orjson.dumps(reply), self._head(turns, "application/json"))

    async def _stream(self, client: _Client, woken: asyncio.Event) -> None:
        in_flight, done = self._in_flight, self._in_flight.done
        turn_ids: list[str] = []
        silent = False
        while not client.gone:
            woken.clear()
            if not client.begun and turn_ids != [turn.turn_id for turn in in_flight.turns]:
                # At first, and after a turn was started over on another engine before any of it was shown.
                turn_ids = [turn.turn_id for turn in in_flight.turns]
                writer = self._api.writer(in_flight.call, turn_ids, in_flight.reader.tokenizer)
                head = self._head(None, "text/event-stream; charset=utf-8")
                shown = [_Shown() for _ in turn_ids]
                opening = writer.begin()  # before all else, as events are numbered; sent with the first
            data = b"".join(self._pieces(writer, shown))
            if silent and not data and not done.done():
                data = writer.keep_alive
            if data:
                await client.body(opening + data, head)
                opening = b""
            if done.done():
                break
            silent = not await _wait(woken, self._keep_alive.stream_s)
        if not done.done():
            return
        error = done.exception()
        if error is not None:
            if not client.begun:
                raise error
            assert isinstance(error, Exception)
            await client.body(writer.failed(self._exchange.error(error)), head, more=False)
            return
        turns = done.result()
        rest = b"".join(self._rest(writer, shown, turns)) + writer.end(turns)
        await self._last(client, turns, opening + rest, head)

    def _pieces(self, writer: StreamWriter, shown: list[_Shown]) -> list[bytes]:
        """The final part of what was sampled since the last time."""
        found = []
        for choice, turn in enumerate(self._in_flight.turns):
            piece = shown[choice].news(turn.certain(), turn.ids, turn.logprobs)
            if piece is not None:
                found.append(writer.piece(choice, *piece))
        return found

    def _rest(self, writer: StreamWriter, shown: list[_Shown], turns: list[CompletedTurn]) -> list[bytes]:
        found = []
        for choice, turn in enumerate(turns):
            whole = Parsed(turn.reply.get("reasoning_content"), turn.reply.get("content") or "", (), ())
            numbers = turn.completed.logprobs
            logprobs = [] if numbers is None else numbers.tolist()
            piece = shown[choice].news(whole, turn.completed.completion_ids.tolist(), logprobs)
            if piece is not None:
                found.append(writer.piece(choice, *piece))
        return found

    async def _last(self, client: _Client, turns: list[CompletedTurn], data: bytes, head: _Head) -> None:
        """Send the end. It counts as delivered if the client had not gone before."""
        there = not client.gone
        delivered = False
        try:
            await client.body(data, head, more=False)
            delivered = there
        finally:
            self._exchange.sent(turns, delivered=delivered)

    def _head(self, turns: list[CompletedTurn] | None, kind: str) -> _Head:
        headers = self._exchange.headers(turns) | {"content-type": kind}
        if kind.startswith("text/event-stream"):
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


_Head = list[tuple[bytes, bytes]]


class _Shown:
    """How much of a choice a client has been sent."""

    def __init__(self) -> None:
        self._reasoning = self._content = self._tokens = 0

    def news(
        self, reply: Parsed, ids: list[int], logprobs: list[float]
    ) -> tuple[str, str, list[tuple[int, float]]] | None:
        """What is new, or None."""
        reasoning, content = (reply.reasoning or "")[self._reasoning :], reply.content[self._content :]
        tokens = list(zip(ids[self._tokens :], logprobs[self._tokens :], strict=False))
        if not (reasoning or content or tokens):
            return None
        self._reasoning += len(reasoning)
        self._content += len(content)
        self._tokens += len(tokens)
        return reasoning, content, tokens


class _Client:
    """The client's end of the connection, watched for a disconnect."""

    def __init__(self, receive: Any, send: Any, in_flight: InFlightCall) -> None:
        self._receive, self._send, self._in_flight = receive, send, in_flight
        self.begun = False
        self.gone = False
        self.on_gone: Callable[[], None] = lambda: None
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.on_gone()

    async def body(self, data: bytes, head: _Head, *, more: bool = True) -> None:
        """Send bytes, the headers first."""
        if not more:
            self.close()  # with the last byte out, "disconnect" no longer means that the client left
        if not self.begun:
            self.begun = self._in_flight.shown = True
            if not more:
                head = [*head, (b"content-length", str(len(data)).encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self) -> None:
        """Stop watching."""
        self._watch.cancel()


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
