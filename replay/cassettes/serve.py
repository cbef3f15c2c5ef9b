"""Serves a cassette until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import uvicorn

from rollbook.ingest.http.web_pages import own
from rollbook.ingest.serve.serve import listening_on
from rollbook.replay.cassettes.app import CassetteOptions, build_cassette_app
from rollbook.replay.cassettes.cassette import Cassette

BACKLOG = 2048
Announce = Callable[[str], None]


def serve_cassette(
    cassette: Cassette, host: str, port: int, options: CassetteOptions, announce: Announce
) -> None:
    """Serve until interrupted.

    Args:
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    with listening_on(host, port) as listener:
        listener.listen(BACKLOG)  # what is announced is there: a program may ask at once
        app = build_cassette_app(cassette, replace(options, own=own(host, socket.gethostname())))
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, log_config=None)
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
