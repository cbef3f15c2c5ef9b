"""The record-only proxy: requests pass to an upstream byte for byte, replies and streams come back likewise.

It fails open: if the store fails, traffic passes, and what was not recorded is counted at /metrics and told
in a header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from fastapi import FastAPI, Request, Response

from rollbook.ingest.error_replies import add_error_replies, error_form
from rollbook.ingest.events_api import add_event_routes
from rollbook.ingest.front_door import BodyRoom, FrontDoor
from rollbook.ingest.identity import KEY_PREFIX, identify
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.metrics import Metrics
from rollbook.ingest.model_routes import ENDPOINTS
from rollbook.ingest.options import ProxyOptions
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.requests import json_object
from rollbook.ingest.retry import retry_count
from rollbook.ingest.sweep import sweep
from rollbook.ingest.trajectory_routes import add_trajectory_routes
from rollbook.ingest.turns import Arrival
from rollbook.ingest.upstream.passage import Passage
from rollbook.ingest.upstream.record import PassageRecorder, Passing
from rollbook.store.errors import EngineError, RequestError
from rollbook.store.events import Json

CONNECT_S = 10.0
NOT_PASSED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
    }
)
"""Headers between two neighbours, which are not passed on; replies come uncompressed, to be read."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where requests go.

    Attributes:
        url: its address, with or without /v1 at the end.
        key: sent instead of the agent's own; None: the agent's is passed on.
        ask: fields put into chat completions and completions, such as `return_token_ids`.
    """

    url: str
    key: str | None = None
    ask: Json | None = None

    def target(self, path: str, query: str) -> str:
        """The address of an endpoint's path."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return base + path + (f"?{query}" if query else "")

    def headers(self, sent: Mapping[str, str], *, own_keys: bool) -> dict[str, str]:
        """Headers to pass on.

        Args:
            own_keys: the key that was sent is the proxy's own, and nobody else's business.
        """
        passed = {k: v for k, v in sent.items() if k not in NOT_PASSED and not k.startswith("x-rollbook-")}
        bearer = passed.get("authorization", "").removeprefix("Bearer ").strip()
        mine = own_keys or bearer.startswith(KEY_PREFIX) or passed.get("x-api-key", "").startswith(KEY_PREFIX)
        if self.key is not None or mine:
            anthropic = "x-api-key" in passed
            passed = {k: v for k, v in passed.items() if k not in ("authorization", "x-api-key")}
            if self.key is not None:
                named = {"x-api-key": self.key} if anthropic else {"authorization": f"Bearer {self.key}"}
                passed |= named
        return passed | {"accept-encoding": "identity"}


@dataclass(slots=True, eq=False)
class UpstreamRoutes:
    """Passes requests on and records those that ask for completions."""

    upstream: Upstream
    door: FrontDoor
    room: BodyRoom
    passages: PassageRecorder
    session: aiohttp.ClientSession | None = None

    async def answer(self, request: Request) -> Response:
        """Whatever the upstream says."""
        said, path, key = self.door.enter(request)
        async with self.room.body(request) as raw:
            passing = None
            if request.method == "POST" and path in ENDPOINTS:
                passing, raw = self._asked(request, path, said, key, raw)
        assert self.session is not None
        headers = self.upstream.headers(request.headers, own_keys=bool(self.door.options.api_keys))
        target = self.upstream.target(path, request.url.query)
        try:
            reply = await self.session.request(
                request.method, target, data=raw, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if passing is not None:
                self.passages.failed(passing, f"the upstream cannot be reached: {error!r}")
                passing.live.running -= 1
            raise EngineError(f"{target} cannot be reached: {error!r}") from error
        recorded = passing is not None or path not in ENDPOINTS
        return Passage(reply, path, self.passages, passing, recorded=recorded)

    def _asked(
        self, request: Request, path: str, said: Json, key: str | None, raw: bytes
    ) -> tuple[Passing | None, bytes]:
        """(the request as recorded, or None; the bytes to pass on)"""
        try:
            sent = json_object(raw)
        except RequestError:
            return None, raw  # the upstream will say so
        body = self.door.options.redactor.body(sent)
        endpoint = ENDPOINTS[path]
        call = self.passages.read(endpoint, body)
        identity = identify(said, request.headers, body, key)
        live = self.door.trajectory(identity, call.messages)
        passing = self.passages.asked(live, call, Arrival.of(path, raw, retry_count(request)))
        self.door.label(live, identity)
        if passing is not None:
            live.running += 1
        if self.upstream.ask and path in ("/v1/chat/completions", "/v1/completions"):
            raw = orjson.dumps(self.upstream.ask | sent)
        return passing, raw


def build_upstream_app(
    recorder: Recorder, upstream: Upstream, options: ProxyOptions | None = None, policy: str = "actor"
) -> FastAPI:
    """The record-only proxy as an ASGI application."""
    options = options or ProxyOptions()
    metrics, door, room = Metrics(), FrontDoor(recorder, options), BodyRoom(options)
    routes = UpstreamRoutes(upstream, door, room, PassageRecorder(recorder, metrics, policy))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        sweeping = asyncio.create_task(sweep(recorder, options.abandoned_s))
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as routes.session:
            yield
        sweeping.cancel()
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    add_error_replies(app, error_form)
    add_trajectory_routes(app, recorder, door)
    streams = app.state.streams = add_event_routes(app, recorder, door.check_operator)
    _add_health(app, recorder, routes, metrics)
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    app.add_route("/t/{said:path}", routes.answer, methods=methods)
    app.add_route("/v1/{path:path}", routes.answer, methods=methods)
    return app


def _add_health(app: FastAPI, recorder: Recorder, routes: UpstreamRoutes, metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, Any]:
        failure = recorder.writer.failure
        response.status_code = 503 if failure else 200
        return {
            "status": failure or "ok",
            "run": recorder.run,
            "lane": recorder.lane,
            "engine": "upstream",
            "policy_version": None,
            "unrecorded": routes.passages.unrecorded,
        }

    @app.get("/metrics")
    async def page(request: Request) -> Response:
        routes.door.check_operator(request)
        alive: list[LiveTrajectory] = recorder.open_trajectories()
        metrics.open.set(len(alive))
        metrics.running.set(sum(t.running for t in alive))
        return await metrics.page(request)
