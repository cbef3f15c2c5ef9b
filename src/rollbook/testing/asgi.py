"""ASGI applications on loopback: uvicorn in a thread, and ports for servers that have to be given one."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

START_S = 20.0


class _Protocol(HttpToolsProtocol):
    """Uvicorn's own, with the connection at hand for tests that break it."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["rollbook.transport"] = self.transport  # type: ignore[typeddict-unknown-key]


def listen(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """A socket that takes connections from now on; port 0 takes a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
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
_drawn: deque[int] = deque(maxlen=256)
"""Lately by this process, whose servers may not have begun yet."""


def free_port() -> int:
    """A loopback port that nobody listens on now, and that no connection takes before its server does.

    It is below those that the kernel gives to outgoing connections: a server may take a minute to start,
    or be away between a kill and its restart. Drawn without a seed: processes with one seed would draw one
    port, and one would speak to the other's server.
    """
    while True:
        wanted = random.SystemRandom().choice(_PORTS)
        if wanted in _drawn:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            _drawn.append(wanted)
            return wanted
