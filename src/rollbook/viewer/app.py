"""The viewer as an ASGI application: its pages, its own files, and what keeps others' scripts out."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rollbook.edge.errors import describe
from rollbook.edge.keys import Keys
from rollbook.store.errors import CorruptionError, QueryError, ReplayError, RequestError
from rollbook.viewer import (
    comparisons,
    console,
    judging,
    live,
    pairs,
    runs,
    samples,
    search,
    steps,
    trajectories,
)
from rollbook.viewer.pages import Page, Part, add_page
from rollbook.viewer.rendering import Templates
from rollbook.viewer.snapshots import Snapshots

PREFIX = "/view"
PAGES: tuple[Page, ...] = (
    *runs.PAGES,
    *steps.PAGES,
    *samples.PAGES,
    *trajectories.PAGES,
    *judging.PAGES,
    *pairs.PAGES,
    *comparisons.PAGES,
    *search.PAGES,
    *live.PAGES,
    *console.PAGES,
)
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""Of a page: it runs, loads and asks nothing but what is the viewer's own (Content Security Policy 3)."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
KEPT_S = 3600
"""So long a browser keeps the viewer's own files."""


def build_viewer(snapshots: Snapshots, rollouts: Path | None = None) -> FastAPI:
    """The viewer's own application, whose addresses begin behind `/view`.

    Args:
        rollouts: folder of the launches' folders; None: what agents print is not shown.
    """
    templates = Templates(PREFIX)
    viewer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    viewer.add_route("/", _to_runs, methods=["GET"])
    viewer.add_route("/static/{name:path}", _static, methods=["GET"])
    console.add_downloads(viewer, snapshots)
    judging.add_judging(viewer, snapshots)
    reader = live.LiveReader(snapshots, PREFIX, rollouts)
    parts: tuple[Page | Part, ...] = live.add_live(viewer, reader)
    for page in (*PAGES, *parts):
        add_page(viewer, page, snapshots, templates)

    async def failed(request: Request, error: Exception) -> Response:
        status, code, message = _described(error)
        if request.url.path.endswith(".json") or request.method == "POST":
            body = orjson.dumps({"error": {"code": code, "message": message}})
            return Response(body, status, media_type="application/json")
        text = templates.draw("error.html", {"status": status, "code": code, "message": message})
        return Response(text, status, media_type="text/html")

    for kind in (*_SAID, RequestError, HTTPException, Exception):
        viewer.add_exception_handler(kind, failed)
    viewer.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    viewer.add_middleware(_Headers)
    return viewer


_SAID: Mapping[type[Exception], tuple[int, str]] = {
    QueryError: (400, "query_failed"),
    ReplayError: (404, "not_in_log"),
    CorruptionError: (500, "log_damaged"),
}
"""Errors whose messages are for whoever reads the log: their statuses and codes."""


def _described(error: Exception) -> tuple[int, str, str]:
    """(status, code, message) of an error."""
    for kind, (status, code) in _SAID.items():
        if isinstance(error, kind):
            return status, code, str(error)
    return describe(error)


def build_view_app(snapshots: Snapshots, keys: Keys | None = None, rollouts: Path | None = None) -> FastAPI:
    """The viewer alone, to which `/` leads; it closes the snapshots, and reads keys again as they change."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = None if keys is None else asyncio.create_task(keys.follow())
        yield
        if following is not None:
            following.cancel()
        await run_in_threadpool(snapshots.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/", _to_runs, methods=["GET"])
    app.mount(PREFIX, build_viewer(snapshots, rollouts))
    return app


async def _to_runs(_: Request) -> Response:
    return RedirectResponse(f"{PREFIX}/runs")


class _Headers:
    """ASGI middleware: every reply has `HEADERS`, but where it says otherwise itself."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


async def _static(request: Request) -> Response:
    """A file of the viewer's own.

    Raises:
        RequestError: 404, there is none of that name.
    """
    name = request.path_params["name"]
    file = files("rollbook.viewer") / "static" / name
    if ".." in name.split("/") or not file.is_file():
        raise RequestError(404, "not_found", f"the viewer has no file {name!r}")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(file.read_bytes(), media_type=kind, headers={"cache-control": f"max-age={KEPT_S}"})
