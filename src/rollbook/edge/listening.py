"""Where a service listens, and one that is served by itself until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from rollbook.edge.web_pages import AllowedHosts, allowed_hosts
from rollbook.store.errors import ConfigError

BACKLOG = 2048
Announce = Callable[[str], None]


def listening_on(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one.

    Raises:
        ConfigError: it cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    return listener


def serve_alone(build: Callable[[AllowedHosts], Any], host: str, port: int, announce: Announce) -> None:
    """Serve an application until interrupted.

    Args:
        build: makes it, given the hosts that requests may be meant for.
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    with listening_on(host, port) as listener:
        listener.listen(BACKLOG)  # what is announced is there: a program may ask at once
        app = build(allowed_hosts(host, socket.gethostname()))
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, log_config=None)
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
