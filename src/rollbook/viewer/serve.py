"""The viewer as a server: by itself at a port, or beside a proxy, which passes requests on to it."""

from __future__ import annotations

import os
import select
import shutil
import threading
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers

from rollbook.edge.guard import CALLER, CALLER_HEADER, add_guards
from rollbook.edge.keys import Caller, Keys, Role
from rollbook.edge.listening import Announce, serve_alone
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.access import run_guard
from rollbook.ingest.endpoints.registry import error_body
from rollbook.store import Store
from rollbook.viewer.app import build_view_app
from rollbook.viewer.snapshots import Snapshots

NICE = 15
"""It yields to whoever records and trains on this host."""


def serve_viewer(
    snapshots: Snapshots, host: str, port: int, keys: Keys, rollouts: Path | None, announce: Announce
) -> None:
    """Serve until interrupted.

    Args:
        rollouts: folder of the launches' folders; None: what agents print is not shown.
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    os.nice(NICE)
    serve_alone(lambda own: guarded_viewer(snapshots, keys, own, rollouts), host, port, announce)


def guarded_viewer(
    snapshots: Snapshots, keys: Keys, own: AllowedHosts, rollouts: Path | None = None
) -> FastAPI:
    """The viewer, for those who have a key, if there are any, and for no page of another site."""
    app = build_view_app(snapshots, keys, rollouts)
    app.add_api_route("/healthz", lambda: {"status": "ok"})  # for probes, which have no key
    add_guards(app, run_guard(keys, "", snapshots.store.path), own, lambda error: None, error_body)
    return app


def serve_viewer_beside(store: Store, socket: Path, parent: int, model: Path | None) -> None:
    """Serve a proxy, which has admitted what it passes on, at a Unix socket, until that proxy has ended."""
    os.nice(NICE)
    app = build_view_app(Snapshots(store, model))
    app.add_middleware(_PassedOn)
    config = uvicorn.Config(
        app,
        uds=str(socket),
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,
        date_header=False,  # the proxy adds its own
        server_header=False,
    )
    server = uvicorn.Server(config)
    proxy = os.pidfd_open(parent)

    def end_with_it() -> None:
        select.select([proxy], [], [])
        server.should_exit = server.force_exit = True

    threading.Thread(target=end_with_it, daemon=True).start()
    server.run()
    shutil.rmtree(socket.parent, ignore_errors=True)  # of a proxy that was killed, too


class _PassedOn:
    """ASGI middleware: the caller is who the proxy says that it is."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            role, _, name = Headers(scope=scope)[CALLER_HEADER].partition(" ")
            scope[CALLER] = Caller(name or None, Role(role))
        await self._app(scope, receive, send)
