"""Scripted ASGI servers: what they have in common, uvicorn in a thread, and loopback ports for servers
that have to be given a port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

JSON, TEXT, STREAM = b"application/json", b"text/plain; charset=utf-8", b"text/event-stream; charset=utf-8"
START_S = 20.0
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


class _Protocol(HttpToolsProtocol):
    """Uvicorn's own, with the connection at hand for tests that break it."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["rollbook.transport"] = self.transport  # type: ignore[typeddict-unknown-key]


def listen(port: int = 0) -> socket.socket:
    """A loopback socket that takes connections from now on; port 0 takes a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(2048)
    return listener


def server_of(app: Any) -> uvicorn.Server:
    """A uvicorn server of the application: uvloop, httptools, no log."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        loop="uvloop",
        lifespan="off",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def run_alone(app: Any, port: int = 0) -> None:
    """Print the address of the application, and serve it until the process ends.

    What the process has made so far stays: the collector of garbage does not look at it again.
    """
    listener = listen(port)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    gc.collect()
    gc.freeze()
    server_of(app).run(sockets=[listener])


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of the application, served by a thread of this process while the context lasts.

    Raises:
        TimeoutError: it did not start.
    """
    server, listener = server_of(app), listen()
    thread = threading.Thread(target=server.run, args=([listener],), name="scripted-server", daemon=True)
    thread.start()
    try:
        waited = threading.Event()
        for _ in range(int(START_S / 0.01)):
            if server.started:
                break
            waited.wait(0.01)
        else:
            raise TimeoutError(f"a scripted server did not start within {START_S:.0f} s")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        listener.close()


_PORTS = range(18_000, 30_000)


def free_port() -> int:
    """A loopback port that nobody listens on now, and that no connection takes before its server does.

    It is below those that the kernel gives to outgoing connections: a server may take a minute to start,
    or be away between a kill and its restart. Drawn without a seed: processes with one seed would draw one
    port, and one would speak to the other's server.
    """
    while True:
        wanted = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return wanted
