"""The viewer as a server of its own."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import Keys
from rollbook.edge.listening import Announce, serve_alone
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.access import ROUTES
from rollbook.ingest.endpoints.registry import error_body
from rollbook.store import Store
from rollbook.viewer.app import build_view_app
from rollbook.viewer.snapshots import Snapshots


def serve_viewer(store: Store, host: str, port: int, model: Path | None, announce: Announce) -> None:
    """Serve until interrupted.

    Args:
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def build(own: AllowedHosts) -> FastAPI:
        app = build_view_app(Snapshots(store, model))
        add_guards(app, Guard(Keys(), ROUTES, "", None), own, lambda error: None, error_body)
        return app

    serve_alone(build, host, port, announce)
