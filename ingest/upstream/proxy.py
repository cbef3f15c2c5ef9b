"""The record-only proxy: requests pass to an upstream byte for byte, replies and streams come back likewise.

By default it fails open: if the store fails, traffic passes; what was not recorded is counted at /metrics and
marked by a header of the reply. With the engine's own key only the agents' APIs pass (`upstream.paths`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from rollbook.edge.forwarding import plain_session
from rollbook.ingest.access import run_guard
from rollbook.ingest.cluster.aggregate import OK, WorkerAggregate, add_aggregate
from rollbook.ingest.cluster.setup import Cluster, add_all_guards, health, join, meeting, stops
from rollbook.ingest.cluster.siblings import Siblings, answer_errors
from rollbook.ingest.options import ProxyOptions
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.routes.events import add_event_routes
from rollbook.ingest.routes.key_watch import KeyWatch, housekeeping
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.routes.trajectories import add_trajectory_routes
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
    options: ProxyOptions | None = None,
    policy: str = "actor",
    others: Cluster | None = None,
) -> FastAPI:
    """The record-only proxy as an ASGI application.

    Args:
        others: its other workers, or the other proxies of the run, if there are any.
    """
    options = (options or ProxyOptions()).recorded_by(recorder)
    metrics, resolver, room = (
        Metrics(),
        RequestResolver(recorder, options, None, others),
        options.body_budget(),
    )
    guard = run_guard(options.keys, recorder.run, recorder.store.path)
    recorder.on_events, recorder.on_lost = KeyWatch(metrics.registry).take, metrics.lost_events.inc
    refuses = options.on_store_failure == "refuse"
    recording = UpstreamRecorder(recorder, metrics, options.redactor, policy, refuses=refuses)
    recording.room = ReplyBudget(options.max_reply_bytes, 4 * options.max_reply_bytes)
    paths = paths_of(upstream.passes) if upstream.secrets else None
    routes = UpstreamRoutes(upstream, resolver, room, recording, paths)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with housekeeping(recorder, options), meeting(others), plain_session() as routes.session:
            yield
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    answer_errors(app, metrics)
    join(app, others, options, recording.knows, room, metrics)
    add_trajectory_routes(app, recorder, resolver, guard, room)
    streams = app.state.streams = add_event_routes(app, recorder, room, options.max_consumers)
    details = partial(_details, recorder, routes, others)
    siblings = others if isinstance(others, Siblings) else None
    add_aggregate(app, WorkerAggregate(siblings, metrics, recorder, details), recorder)
    app.add_route("/t/{said:path}", routes.answer, methods=METHODS)
    app.add_route("/v1/{path:path}", routes.answer, methods=METHODS)
    add_all_guards(app, others, options, guard, metrics)
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
        **routes.resolver.options.keys.trouble(),
    }
