"""The record-only proxy: requests pass to an upstream byte for byte, replies and streams come back likewise.

By default it fails open: if the store fails, traffic passes, and what was not recorded is counted at /metrics
and told in a header. With the engine's own key only the agents' APIs pass (`upstream.paths`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import FastAPI, Request, Response
from yarl import URL

from rollbook.ingest.http.access import Caller, sees_details
from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.content_encoding import decoded
from rollbook.ingest.http.disconnect import ClientGone, ClientWatch
from rollbook.ingest.http.error_replies import add_error_replies, error_form
from rollbook.ingest.http.events_api import add_event_routes
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.guard import Guard, add_guards, caller_of
from rollbook.ingest.http.key_watch import KeyWatch
from rollbook.ingest.http.metrics import Metrics
from rollbook.ingest.http.model_routes import ENDPOINTS
from rollbook.ingest.http.options import ProxyOptions
from rollbook.ingest.http.trajectory_routes import add_trajectory_routes
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.redact import changes_conversation
from rollbook.ingest.recording.sweep import sweep
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.requests.fields import check_recordable
from rollbook.ingest.requests.json_bounds import check_depth, check_weight
from rollbook.ingest.requests.large_work import beside
from rollbook.ingest.trajectories.identity import Identity, identify
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.request_limits import OUTSIDE_BYTES, check_outside
from rollbook.ingest.turns.retry import retry_count
from rollbook.ingest.upstream.credentials import sent_credentials
from rollbook.ingest.upstream.forwarded_call import ForwardedCall
from rollbook.ingest.upstream.forwarded_response import ForwardedResponse
from rollbook.ingest.upstream.paths import Paths, meant, paths_of, response_named
from rollbook.ingest.upstream.recorder import UpstreamRecorder
from rollbook.ingest.upstream.references import References, named_ids
from rollbook.ingest.upstream.reply_copy import ReplyRoom
from rollbook.ingest.upstream.request import read_call
from rollbook.ingest.upstream.stream import json_of
from rollbook.ingest.upstream.target import Upstream as Upstream
from rollbook.store.errors import EngineError, LimitError, RequestError, StoreError
from rollbook.store.events import QUARANTINE, Json
from rollbook.store.redaction import secrets_in, shown

CONNECT_S = 10.0
PATIENCE_S = 2.0
"""So long a request waits for what its trajectory was to have on disk; then it passes unrecorded."""
KEEP_ALIVE_S = 4.0
"""An idle connection is given up before the common servers give it up: a request may not be sent twice."""
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
SERVER_OPTIONS = {"server_header": False, "date_header": False}
"""For uvicorn: a reply has the headers that the upstream gave it."""
_TAKES_MORE = ("/v1/chat/completions", "/v1/completions")


@dataclass(slots=True, eq=False)
class UpstreamRoutes:
    """Passes requests on and records those that ask for completions."""

    upstream: Upstream
    door: FrontDoor
    room: BodyRoom
    recording: UpstreamRecorder
    paths: Paths | None = None
    """Those that pass; None: all."""
    session: aiohttp.ClientSession | None = None
    _running: int = field(default=0)

    async def answer(self, request: Request) -> Response:
        """Whatever the upstream says."""
        said, path, caller = self.door.enter(request)
        if self.paths is not None:
            self.paths.check(request.method, path)
            self._check_response(said, request, caller, response_named(request.method, meant(path)))
        self.door.check_running(self._running)
        async with self.room.body(request) as raw:  # who sends slowly is not running yet
            return await self._answered(request, said, path, caller, raw)

    async def _answered(
        self, request: Request, said: Json, path: str, caller: Caller, raw: bytes
    ) -> Response:
        self.door.check_running(self._running)
        self._running += 1
        try:
            forwarded, endpoint = None, meant(path)
            if request.method == "POST" and endpoint in ENDPOINTS:
                forwarded, raw = await self._asked(request, endpoint, said, caller, raw)
                if forwarded is not None:
                    await self._begin(forwarded)
            else:
                self.recording.metrics.passed.labels(request.method).inc()
            return await self._passed(request, path, raw, forwarded)
        except BaseException:
            self._running -= 1
            raise

    async def _passed(
        self, request: Request, path: str, raw: bytes, forwarded: ForwardedCall | None
    ) -> Response:
        """The reply, once it begins."""
        watch = ClientWatch(request.receive)
        try:
            reply = await watch.race(self._send(request, path, raw, plain=forwarded is not None))
        except BaseException as error:
            watch.close()
            why = _failure(error)
            if forwarded is not None:
                await self._broken_off(forwarded, why)
            if isinstance(error, ClientGone):
                self._left()
                return Response(status_code=499)  # to nobody
            if isinstance(error, aiohttp.ClientError | TimeoutError | OSError | ValueError):
                raise EngineError(f"{self.upstream.url} cannot be reached: {why}") from error
            raise
        if forwarded is not None:
            forwarded.replying()
        endpoint = meant(path)
        told = self._told(request, endpoint, forwarded, reply.status)
        secrets = partial(self._secrets, request, raw)
        return ForwardedResponse(reply, endpoint, self.recording, forwarded, watch, told, self._left, secrets)

    def _secrets(self, request: Request, raw: bytes) -> set[str]:
        """What an error must not repeat on disk."""
        query = request.scope.get("query_string", b"").decode("latin-1")
        found = sent_credentials(request.headers.raw, query, self.upstream.secrets)
        with contextlib.suppress(RequestError):
            encoding = request.headers.get("content-encoding", "")
            sent = json_of(decoded(raw, encoding, self.door.options.max_body_bytes))
            found |= secrets_in(sent) if isinstance(sent, dict) else set()
        return found

    async def _send(self, request: Request, path: str, raw: bytes, *, plain: bool) -> aiohttp.ClientResponse:
        assert self.session is not None
        own_keys = self.door.options.keys.configured
        headers = self.upstream.headers(request.headers.raw, path, own_keys=own_keys, plain=plain)
        query = request.scope.get("query_string", b"").decode("latin-1")
        target = URL(self.upstream.target(path, query), encoded=True)
        return await self.session.request(
            request.method, target, data=raw or None, headers=headers, allow_redirects=False
        )

    async def _broken_off(self, forwarded: ForwardedCall, why: str) -> None:
        forwarded.replying()
        try:
            self.recording.failed(forwarded, f"the upstream gave no reply: {why}")
            await self.recording.durable(forwarded, delivered=False)
        finally:
            forwarded.left()

    def _told(
        self, request: Request, path: str, forwarded: ForwardedCall | None, status: int
    ) -> dict[str, str]:
        """What a reply says beside the upstream's own headers."""
        if forwarded is not None:
            opened = forwarded.live.opened
            told = {
                "x-rollbook-turn-id": ",".join(r.turn_id for r in forwarded.requested),
                "x-rollbook-trajectory-id": opened.trajectory_id,
            }
            return told | (
                {"x-rollbook-quarantined": quote(opened.name)} if opened.split == QUARANTINE else {}
            )
        return {"x-rollbook-unrecorded": "1"} if request.method == "POST" and path in ENDPOINTS else {}

    def _left(self) -> None:
        self._running -= 1

    async def _begin(self, forwarded: ForwardedCall) -> None:
        """Let a request pass, or refuse it where it may not pass unrecorded."""
        forwarded.begin()
        try:
            await self.recording.kept(forwarded)
        except BaseException:
            forwarded.refused()
            raise

    async def _asked(
        self, request: Request, path: str, said: Json, caller: Caller, raw: bytes
    ) -> tuple[ForwardedCall | None, bytes]:
        """(the request as recorded, or None; the bytes to pass on)

        Args:
            path: the endpoint that is meant.

        Raises:
            RequestError: it names no trajectory that it can belong to, or goes on from another's response, or
                cannot be recorded where that is refused.
        """
        try:
            plain = await self.room.decoded(raw, request.headers.get("content-encoding", ""))
            sent, body = await beside(len(plain), self._read, plain)
        except Exception as error:
            if isinstance(error, LimitError):
                self.recording.metrics.refused(error.code)
            self.recording.unrecordable(1, f"a request cannot be read: {error!r}")
            return None, raw
        identity = self.door.hinted(identify(said, request.headers, body, caller.key))
        if self.paths is not None and path == "/v1/responses":
            for named in named_ids(body):
                self._check_response(said, request, caller, named)
        try:
            async with asyncio.timeout(PATIENCE_S):
                known = await self._known(identity, body, caller)
            call = await self._call(path, body, known, len(plain))
            if call is None:
                return None, raw
            async with asyncio.timeout(PATIENCE_S):
                live = await self._live(identity, known, call, len(plain), caller)
        except (StoreError, OSError, TimeoutError) as error:
            logging.getLogger(__name__).info("rollbook: a trajectory cannot be read: %r", error)
            self.recording.unrecordable(1)
            return None, raw
        arrival = Arrival.kept(path, raw, sent, body, retry_count(request), caller.name)
        forwarded = self._recorded(live, call, arrival, redacted=changes_conversation(sent, body))
        if self.upstream.ask and path in _TAKES_MORE:
            raw = orjson.dumps(self.upstream.ask | sent)
        return forwarded, raw

    async def _call(self, path: str, body: Json, known: LiveTrajectory | None, size: int) -> ModelCall | None:
        """What is asked; None: it cannot be read."""
        references = References(None if known is None else known.contents)
        try:
            return await beside(size, read_call, ENDPOINTS[path], body, references)
        except Exception as error:
            self.recording.unrecordable(1, f"a request cannot be read: {error!r}")
            return None

    async def _live(
        self, identity: Identity, known: LiveTrajectory | None, call: ModelCall, size: int, caller: Caller
    ) -> LiveTrajectory:
        """The trajectory that a request belongs to, to be used at once.

        Raises:
            RequestError: it names one that it cannot belong to.
        """
        if identity.name is None and known is not None:
            again = await self.recording.recorder.recall(known.opened.name)
            if again is known and not known.finished:
                return known
        return await self.door.trajectory(identity, call.messages, size, caller.name)

    def _recorded(
        self, live: LiveTrajectory, call: ModelCall, arrival: Arrival, *, redacted: bool
    ) -> ForwardedCall | None:
        """The request as recorded; None: it could not be.

        Raises:
            RequestError: it may not pass unrecorded.
        """
        try:
            return self.recording.asked(live, call, arrival, redacted=redacted)
        except RequestError:
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("rollbook: a request cannot be recorded")
            self.recording.unrecordable(1, f"a request cannot be recorded: {error!r}")
            return None

    def _read(self, plain: bytes) -> tuple[Json, Json]:
        """(a body, the same as it may be recorded)

        Raises:
            RequestError: it is no JSON object that could be recorded.
        """
        check_weight(plain)
        sent = json_of(plain)
        if not isinstance(sent, dict):
            raise RequestError(400, "bad_json", "a request's body is no JSON object")
        check_depth(sent)
        if len(plain) > OUTSIDE_BYTES:
            check_outside(sent)
        body = self.door.options.redactor.body(sent)
        check_recordable(body)
        return sent, body

    def _check_response(self, said: Json, request: Request, caller: Caller, response_id: Any) -> None:
        """Refuse another's response: behind the engine's key they all lie together.

        Raises:
            RequestError: 404, none of that id passed here in the trajectory that is named, or by this key.
        """
        if not isinstance(response_id, str):
            return
        owner, identity = self.recording.owner(response_id), identify(said, request.headers, {}, caller.key)
        if owner is None or not owner.lets(caller, identity.name if identity.explicit else None):
            text = f"no response {response_id[:200]!r} passed here in this trajectory or by this key"
            raise RequestError(404, "unknown_response", text)

    async def _known(self, identity: Identity, body: Json, caller: Caller) -> LiveTrajectory | None:
        """The trajectory that a request belongs to, if it is there: by its name, or by what it refers to.

        Raises:
            RequestError: 409, another proxy writes it.
        """
        recorder = self.recording.recorder
        if identity.name is not None:
            await recorder.recall(identity.name)
            return recorder.find(identity.name)
        known = self.recording.referred(body, caller)
        return None if known is None else await recorder.recall(known.opened.name)


def _failure(error: BaseException) -> str:
    """An error without the address, whose query may hold a key."""
    if isinstance(error, ClientGone):
        return "the client left before it began"
    if isinstance(error, aiohttp.InvalidURL):
        return "its address is no URL"
    return shown(repr(error))


def build_upstream_app(
    recorder: Recorder, upstream: Upstream, options: ProxyOptions | None = None, policy: str = "actor"
) -> FastAPI:
    """The record-only proxy as an ASGI application."""
    options = (options or ProxyOptions()).recorded_by(recorder)
    metrics, door, room = Metrics(), FrontDoor(recorder, options), BodyRoom(options)
    guard = Guard.of(options.keys, recorder.run, recorder.store.path)
    recorder.on_events, recorder.on_lost = KeyWatch(metrics.registry).take, metrics.lost_events.inc
    refuses = options.on_store_failure == "refuse"
    recording = UpstreamRecorder(recorder, metrics, options.redactor, policy, refuses=refuses)
    recording.room = ReplyRoom(options.max_reply_bytes, 4 * options.max_reply_bytes)
    paths = paths_of(upstream.passes) if upstream.secrets else None
    routes = UpstreamRoutes(upstream, door, room, recording, paths)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(sweep(recorder, options.abandoned_s))
        following = asyncio.create_task(options.keys.follow())
        async with _session() as routes.session:
            yield
        sweeping.cancel()
        following.cancel()
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    add_error_replies(app, error_form, metrics.refused)
    app.state.refused = metrics.refused
    add_trajectory_routes(app, recorder, door, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, options.max_consumers)
    _add_health(app, recorder, routes, metrics)
    app.add_route("/t/{said:path}", routes.answer, methods=METHODS)
    app.add_route("/v1/{path:path}", routes.answer, methods=METHODS)
    add_guards(app, guard, options.own, metrics.failed)
    return app


def _session() -> aiohttp.ClientSession:
    """Connections that add nothing of their own: no headers, no cookies of somebody else's, no decoding."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        auto_decompress=False,
    )


def _add_health(app: FastAPI, recorder: Recorder, routes: UpstreamRoutes, metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz(request: Request, response: Response) -> dict[str, Any]:
        failure = recorder.writer.failure or recorder.writer.waiting
        response.status_code = 503 if failure else 200
        if not sees_details(caller_of(request)):
            return {"status": "failing" if failure else "ok"}
        told: Json = {
            "status": failure or "ok",
            "run": recorder.run,
            "lane": recorder.lane,
            "engine": "upstream",
            "policy_version": None,
            "unrecorded": routes.recording.unrecorded,
            **routes.door.options.keys.trouble(),
        }
        return recorder.redactor.fields(told)

    @app.get("/metrics")
    async def page() -> Response:
        return metrics.page(recorder)
