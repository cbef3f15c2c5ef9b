"""The viewer as a server of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import Keys
from rollbook.edge.web_pages import allowed_hosts
from rollbook.ingest.access import ROUTES
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.serve.serve import listening_on
from rollbook.store import Store
from rollbook.viewer.app import build_view_app
from rollbook.viewer.snapshots import Snapshots

BACKLOG = 128


def serve_viewer(
    store: Store, host: str, port: int, model: Path | None, announce: Callable[[str], None]
) -> None:
    """Serve until interrupted.

    Args:
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    with listening_on(host, port) as listener:
        listener.listen(BACKLOG)
        app = build_view_app(Snapshots(store, model))
        mine = allowed_hosts(host, socket.gethostname())
        add_guards(app, Guard(Keys(), ROUTES, "", None), mine, lambda error: None, error_body)
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, log_config=None)
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
