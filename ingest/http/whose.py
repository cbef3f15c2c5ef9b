"""Whose this proxy is, and that nobody else controls its engine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request

from rollbook.ingest.engines.weights.name import read_name
from rollbook.ingest.engines.whose import FOR, START, Whose
from rollbook.ingest.recording.recorder import Recorder
from rollbook.store.errors import RequestError

NAMED_BYTES = 1 << 16
"""A body that names weights is small."""


def whose(recorder: Recorder) -> Whose:
    """Whose this proxy is."""
    return Whose(recorder.store.store_id, recorder.run, os.environ.get(START, ""))


def only_for(own: Whose) -> Callable[[Request], Awaitable[None]]:
    """What refuses whoever controls the engine for another run, by a header or by the name of its weights."""

    async def check(request: Request) -> None:
        wanted = [Whose.of_header(request.headers.get(FOR, ""))]
        if request.method == "POST" and len(body := await request.body()) <= NAMED_BYTES:
            wanted += [Whose(run=run) for run in _runs_named(body)]
        for one in wanted:
            if (why := one.refuses(own)) is not None:
                text = f"this proxy {why}: give the training its own proxy's address, or this run's name"
                raise RequestError(409, "other_run", text)

    return check


def _runs_named(body: bytes) -> list[str]:
    """The runs of which a body names weights."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    names = [said.get(key) for key in ("weight_version", "new_version")] if isinstance(said, dict) else []
    return [named.run for name in names if (named := read_name(name)) is not None]
