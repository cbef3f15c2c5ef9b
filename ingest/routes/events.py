"""The log over HTTP: its tail at `GET /v1/events`, and consumers' cursors at `/v1/cursors/NAME`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

import orjson
from fastapi import FastAPI, Request, Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.guard import caller_of
from rollbook.ingest.access import JUDGES_KINDS, may_read_kinds
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.routes.event_feed import ArrowFeed, EventStreams, SseFeed
from rollbook.store import Store, format_cut, parse_cut
from rollbook.store.errors import CutError, RequestError
from rollbook.store.events import RECORDS, CursorMoved, Json
from rollbook.store.log.consumer import NO_CURSORS, Cursors
from rollbook.store.log.tail import Filter, Tail, held_of

PARAMETERS = frozenset({"from", "kinds", "run", "limit", "follow", "format"})
FORMATS = ("sse", "arrow")
ARROW_STREAM = "application/vnd.apache.arrow.stream"
EVERY_KIND = "*"
CURSOR_BYTES = 1 << 20
"""Most bytes of a cursor's body: a cut names each lane once."""
Query = Mapping[str, str]


def add_event_routes(app: FastAPI, recorder: Recorder, room: BodyBudget, most: int = 64) -> EventStreams:
    """Add `GET /v1/events` and `/v1/cursors/NAME`; the streams, to be closed with the application.

    Args:
        most: streams of events that may be open at once.
    """
    streams = EventStreams(recorder.store, most)

    @app.get("/v1/events")
    async def events(request: Request) -> Response:
        return await _events(streams, request)

    _add_cursor_routes(app, recorder, streams, room)
    return streams


# The tail -----------------------------------------------------------------------------------


async def _events(streams: EventStreams, request: Request) -> Response:
    streams.check()
    query = request.query_params
    for name in query:
        if name not in PARAMETERS:
            raise _bad_query(f"parameter {name!r}", f"use {', '.join(sorted(PARAMETERS))}")
    # A browser's EventSource sends the address it began with and the last id it has: the id is newer.
    start = request.headers.get("last-event-id") or query.get("from")
    form = query.get("format", "sse")
    if form not in FORMATS:
        raise _bad_query(f"format={form}", f"use {' or '.join(FORMATS)}")
    follow = _flag(query, "follow", form == "sse")
    limit, wanted = _limit(query), _wanted(query)
    if not may_read_kinds(caller_of(request), wanted.kinds):
        text = f"a judge's key reads these kinds of events: ?kinds={','.join(sorted(JUDGES_KINDS))}"
        raise RequestError(403, "not_permitted", text)
    if form == "sse":
        tail = await streams.run(_tail, streams.store, start, wanted)
        no_cache = {"cache-control": "no-cache"}
        return streams.response(SseFeed(tail, limit), "text/event-stream", follow=follow, headers=no_cache)
    if follow:
        raise _bad_query("follow=true", "an Arrow stream ends at the head: ask again from its X-Rollbook-Cut")
    tail = await streams.run(_tail, streams.store, start, wanted)
    end = _end(tail.cut(), await streams.run(streams.store.head), limit)
    tail.until = end
    headers = {"x-rollbook-cut": format_cut(end)}
    return streams.response(ArrowFeed(tail), ARROW_STREAM, headers=headers)


def _tail(store: Store, start: str | None, wanted: Filter) -> Tail:
    """The tail from a cut as text.

    Raises:
        RequestError: 400 no cut, 409 a cut that the store does not hold.
    """
    try:
        named = start is not None and (start == "head" or start.startswith("step:"))
        cut = store.cut(start or "") if named else parse_cut(start or "empty")
    except CutError as error:
        raise RequestError(400, "bad_cut", str(error)) from error
    with _of_this_store():
        return Tail(store.path, cut, wanted)


@contextlib.contextmanager
def _of_this_store() -> Iterator[None]:
    """Context: what refuses a cut as more than the store holds is a RequestError, 409."""
    try:
        yield
    except CutError as error:
        text = f"{error}: is this the store that the cut is from?"
        raise RequestError(409, "cut_not_held", text) from error


def _end(start: Mapping[str, int], head: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """The cut `limit` events after `start`, lane by lane; the head without a limit."""
    end = dict(start)
    left = sum(head.values()) if limit is None else limit
    for lane, count in sorted(head.items()):
        taken = min(count - start.get(lane, 0), left)
        end[lane] = start.get(lane, 0) + taken
        left -= taken
    return end


def _wanted(query: Query) -> Filter:
    text = query.get("kinds")
    if text == EVERY_KIND:
        return Filter(run=query.get("run"))
    if not text:
        return Filter(without=NO_CURSORS, run=query.get("run"))
    kinds = frozenset(kind.strip() for kind in text.split(","))
    if unknown := sorted(kinds - set(RECORDS)):
        raise _bad_query(f"kind {unknown[0]!r}", f"use '*' or some of {', '.join(sorted(RECORDS))}")
    return Filter(kinds, run=query.get("run"))


def _flag(query: Query, name: str, default: bool) -> bool:
    value = query.get(name)
    if value not in (None, "true", "false"):
        raise _bad_query(f"{name}={value}", "use true or false")
    return default if value is None else value == "true"


def _limit(query: Query) -> int | None:
    text = query.get("limit")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17 and 0 < int(text) < 2**53):
        raise _bad_query(f"limit={text}", "use a number of events, 1 or more")
    return int(text)


def _bad_query(what: str, remedy: str) -> RequestError:
    return RequestError(400, "bad_query", f"{what} is not understood: {remedy}")


# Cursors ------------------------------------------------------------------------------------


def _add_cursor_routes(app: FastAPI, recorder: Recorder, streams: EventStreams, room: BodyBudget) -> None:
    cursors = Cursors(recorder.store.path)
    moving = asyncio.Lock()

    @app.get("/v1/cursors/{name}")
    async def read_cursor(name: str) -> Json:
        cut = await _cursor(streams, cursors, name)
        if cut is None:
            text = f"no consumer {name!r} has a cursor: PUT one, or begin without `from`"
            raise RequestError(404, "unknown_cursor", text)
        return {"cut": format_cut(cut)}

    @app.put("/v1/cursors/{name}")
    async def move_cursor(name: str, request: Request) -> Json:
        async with room.plain(request, CURSOR_BYTES) as raw:
            cut = _cut_of(raw)
        async with moving:
            old = await _cursor(streams, cursors, name) or {}
            await streams.run(_check_move, streams.store, name, old, cut)
            if cut != old:
                await recorder.write(CursorMoved(name, format_cut(cut), caller_of(request).name))
        return {"cut": format_cut(cut)}


async def _cursor(streams: EventStreams, cursors: Cursors, name: str) -> dict[str, int] | None:
    try:
        return await streams.run(cursors.find, name)
    except CutError as error:
        raise RequestError(400, "bad_name", str(error)) from error


def _cut_of(raw: bytes) -> dict[str, int]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or set(body) != {"cut"} or not isinstance(body["cut"], str):
        raise RequestError(400, "bad_request", 'send {"cut": "lane=count,lane=count"}')
    try:
        return parse_cut(body["cut"])
    except CutError as error:
        raise RequestError(400, "bad_cut", str(error)) from error


def _check_move(store: Store, name: str, old: Mapping[str, int], new: Mapping[str, int]) -> None:
    """See that a cursor moves forward, to what the store holds.

    Raises:
        RequestError: 409.
    """
    with _of_this_store():
        _check_forward(name, held_of(store.path, old), new)
        held_of(store.path, new)


def _check_forward(name: str, old: Mapping[str, int], new: Mapping[str, int]) -> None:
    """A cursor only moves forward, so the order in which its events are read does not matter.

    Raises:
        RequestError: 409, some lane would go back.
    """
    for lane, count in sorted(old.items()):
        if new.get(lane, 0) < count:
            text = (
                f"consumer {name!r} has dealt with {count} events of lane {lane!r}, and this cut holds "
                f"{new.get(lane, 0)}: to read again use another name, or `from`"
            )
            raise RequestError(409, "cursor_moves_back", text)
