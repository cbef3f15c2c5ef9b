"""The record-only proxy: requests pass to an upstream byte for byte, replies and streams come back likewise.

By default it fails open: if the store fails, traffic passes; what was not recorded is counted at /metrics and
marked by a header of the reply. With the engine's own key only the agents' APIs pass (`upstream.paths`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.forwarding import plain_session
from rollbook.ingest.access import run_guard
from rollbook.ingest.cluster.aggregate import OK, WorkerAggregate, add_aggregate
from rollbook.ingest.cluster.setup import Cluster, add_all_guards, health, join, meeting, stops
from rollbook.ingest.cluster.siblings import Siblings, answer_errors
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.routes.events import add_event_routes
from rollbook.ingest.routes.key_watch import KeyWatch, housekeeping
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.routes.trajectories import add_trajectory_routes
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.upstream.paths import Upstream as Upstream
from rollbook.ingest.upstream.paths import paths_of
from rollbook.ingest.upstream.recorder import ReplyBudget, UpstreamRecorder
from rollbook.ingest.upstream.routes import UpstreamRoutes
from rollbook.store.events import Json

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
SERVER_OPTIONS = {"server_header": False, "date_header": False}
"""For uvicorn: replies keep the upstream's own headers."""


def build_upstream_app(
    recorder: Recorder,
    upstream: Upstream,
    settings: ServeSettings,
    secrets: ProxySecrets,
    others: Cluster | None = None,
) -> FastAPI:
    """The record-only proxy as an ASGI application.

    Args:
        others: its other workers, or the other proxies of the run, if there are any.
    """
    recorder.redactor = redactor = recorder.redactor.with_patterns(settings.redact)
    metrics, resolver = Metrics(), RequestResolver(recorder, settings, None, others)
    room = BodyBudget(**settings.body_limits)
    guard = run_guard(secrets.keys, recorder.run, recorder.store.path)
    recorder.on_events, recorder.on_lost = KeyWatch(metrics.registry).take, metrics.lost_events.inc
    refuses = settings.on_store_failure == "refuse"
    recording = UpstreamRecorder(recorder, metrics, redactor, settings.policy, refuses=refuses)
    recording.room = ReplyBudget(settings.max_reply_bytes, 4 * settings.max_reply_bytes)
    paths = paths_of(upstream.passes) if upstream.secrets else None
    routes = UpstreamRoutes(upstream, resolver, room, recording, secrets.keys, paths)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        upkeep = housekeeping(recorder, settings.abandon_s, secrets.keys)
        async with upkeep, meeting(others), plain_session() as routes.session:
            yield
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    answer_errors(app, metrics)
    join(app, others, redactor.text, recording.knows, room, metrics)
    add_trajectory_routes(app, recorder, resolver, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, settings.max_consumers)
    details = partial(_details, recorder, routes, others)
    siblings = others if isinstance(others, Siblings) else None
    add_aggregate(app, WorkerAggregate(siblings, metrics, recorder, details), recorder)
    app.add_route("/t/{said:path}", routes.answer, methods=METHODS)
    app.add_route("/v1/{path:path}", routes.answer, methods=METHODS)
    add_all_guards(app, others, secrets.own, guard, metrics)
    stops(app, others, room.stop)
    return app


def _details(recorder: Recorder, routes: UpstreamRoutes, others: Cluster | None) -> Json:
    """What is known of this process's health."""
    return {
        "status": recorder.writer.failure or recorder.writer.waiting or OK,
        "run": recorder.run,
        "lane": recorder.lane,
        "engine": "upstream",
        "policy_version": None,
        "unrecorded": routes.recording.unrecorded,
        **health(others),
        **routes.keys.trouble(),
    }
