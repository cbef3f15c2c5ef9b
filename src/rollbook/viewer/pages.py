"""Pages, and how one is answered: read from a snapshot in a thread, then shown as HTML or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rollbook.store.errors import RequestError
from rollbook.viewer.rendering import JSON, Templates, name_of
from rollbook.viewer.snapshots import Snapshot, Snapshots

Query = Mapping[str, str]
"""What an address says: the parts of its path, and what stands behind the question mark."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the viewer.

    Attributes:
        path: of its address, with `{name}` for what it is about.
        template: which shows it.
        read: makes of a snapshot, and of what the address says, the record that is shown.
    """

    path: str
    template: str
    read: Callable[[Snapshot, Query], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a page that is asked for again and again, and is read from what the viewer has at hand."""

    path: str
    template: str
    read: Callable[[Query], Any]


def add_page(app: FastAPI, page: Page | Part, snapshots: Snapshots, templates: Templates) -> None:
    """Add a page at its address, and what it shows at the same address with `.json`."""

    def read(request: Request) -> tuple[Any, dict[str, int] | None]:
        names = {key: name_of(text) for key, text in request.path_params.items()}
        query = {**request.query_params, **names}
        if isinstance(page, Part):
            return page.read(query), None
        with snapshots.reading() as snapshot:
            return page.read(snapshot, query), dict(snapshot.cut)

    async def as_json(request: Request) -> Response:
        record, _ = await run_in_threadpool(read, request)
        return Response(orjson.dumps(record, option=JSON), media_type="application/json")

    async def as_html(request: Request) -> Response:
        record, cut = await run_in_threadpool(read, request)
        return HTMLResponse(await run_in_threadpool(templates.draw, page.template, record, cut))

    app.add_route(f"{page.path}.json", as_json, methods=["GET"])
    app.add_route(page.path, as_html, methods=["GET"])


def whole_number(query: Query, name: str, default: int | None = None) -> int | None:
    """A number that an address may give.

    Raises:
        RequestError: 400, it is none.
    """
    text = query.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(400, "bad_query", f"{name}={text[:40]!r}: give a whole number")
    return int(text)


def missing(what: str, remedy: str) -> RequestError:
    """The error of a page about something that the log does not have."""
    return RequestError(404, "not_in_log", f"{what} is not in this log: {remedy}")
