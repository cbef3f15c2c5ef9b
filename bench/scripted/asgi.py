"""What scripted ASGI servers have in common: bodies, replies, broken connections, a process of their own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from rollbook.testing.asgi import listen, server_of

JSON, TEXT, STREAM = b"application/json", b"text/plain; charset=utf-8", b"text/event-stream; charset=utf-8"
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request."""
    message = await receive()
    if not message.get("more_body"):
        body: bytes = message.get("body", b"")
        return body
    parts = [message["body"]]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, content: Any) -> None:
    """Answer with bytes as plain text, or with anything else as JSON."""
    text = isinstance(content, bytes)
    body = content if text else orjson.dumps(content)
    headers = [(b"content-type", TEXT if text else JSON), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_part(send: Send, data: bytes, *, first: bool) -> None:
    """Send the next part of an event stream, which the first one begins."""
    if first:
        headers = [(b"content-type", STREAM)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def drop(scope: Message) -> None:
    """Abort the connection of a request."""
    scope["rollbook.transport"].abort()
    await asyncio.sleep(0.01)  # until the server notices that the client has gone


def run_alone(app: Any, port: int = 0, host: str = "127.0.0.1") -> None:
    """Print the address of the application, and serve it until the process ends.

    What the process has made so far stays: the collector of garbage does not look at it again.
    """
    listener = listen(port, host)
    print(f"http://{host}:{listener.getsockname()[1]}", flush=True)
    gc.collect()
    gc.freeze()
    server_of(app).run(sockets=[listener])
