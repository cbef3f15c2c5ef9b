"""/healthz and /metrics, which any worker of a proxy answers for all of its workers.

They also say whose this proxy is, and nobody else may control its engine.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from starlette.requests import Request

from rollbook.edge.guard import caller_of
from rollbook.engines.weights.name import read_name
from rollbook.ingest.access import sees_details
from rollbook.ingest.cluster.siblings import Siblings
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.secret import store_secret
from rollbook.store.whose import ASKS, FOR, PROVES, PROVING, START, ProxyIdentity, proof

HEALTH, METRICS = "health", "metrics"
OK = "ok"
_OF_EACH = ("lane", "status", "policy_version", "unrecorded")
"""What is said of each worker, of what it says of itself."""


class WorkerAggregate:
    """Answers for all workers; for the only one, as itself.

    Args:
        details: what a worker's own /healthz says; its `status` is `ok`, or why it fails.
        version: the policy version that its engines serve.
    """

    def __init__(
        self,
        siblings: Siblings | None,
        metrics: Metrics,
        recorder: Recorder,
        details: Callable[[], Json],
        version: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._siblings, self._metrics, self._recorder = siblings, metrics, recorder
        self._details, self._version = details, version
        if siblings is not None:
            siblings.bus.on(HEALTH, self._own_health)
            siblings.bus.on(METRICS, self._own_metrics)

    async def _own_health(self, *_: Any) -> tuple[Json, bytes]:
        return self._details(), b""

    async def _own_metrics(self, *_: Any) -> tuple[Json, bytes]:
        self._metrics.update(self._recorder, self._version())
        return {}, packed(self._metrics.registry)

    async def health(self) -> Json:
        """What /healthz says; `workers` has each, and one that fails makes all fail."""
        own = self._details()
        if self._siblings is None:
            return own
        answers = await self._siblings.bus.ask_all(HEALTH)
        details = {self._siblings.place.number: own}
        for number, answer in answers.items():
            away = {"lane": None, "status": f"worker {number} does not answer"}
            details[number] = away if answer is None else answer[0]
        workers = [
            {"worker": number, **{key: health[key] for key in _OF_EACH if key in health}}
            for number, health in sorted(details.items())
        ]
        failing = next((health["status"] for health in workers if health["status"] != OK), OK)
        return {key: value for key, value in own.items() if key != "lane"} | {
            "status": failing,
            "workers": workers,
        }

    async def metrics(self) -> Response:
        """The text that Prometheus reads; of several workers each series has the label `worker`."""
        self._metrics.update(self._recorder, self._version())
        if self._siblings is None:
            return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)
        answers = await self._siblings.bus.ask_all(METRICS)
        pages = {number: answer[1] for number, answer in answers.items() if answer is not None}
        pages[self._siblings.place.number] = packed(self._metrics.registry)
        page = generate_latest(_Merged(merged(pages.items())))
        return Response(page, media_type=CONTENT_TYPE_LATEST)


class _Merged:
    """Families of metrics, as a registry shows them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """The families."""
        return self._families


def packed(registry: CollectorRegistry) -> bytes:
    """All series of a registry, for another process."""
    return orjson.dumps(
        [
            (family.name, family.documentation, family.type, [tuple(sample)[:3] for sample in family.samples])
            for family in registry.collect()
        ]
    )


def merged(pages: Iterable[tuple[int, bytes]]) -> list[Metric]:
    """The series of several workers, each with its worker's number. Pure."""
    families: dict[str, Metric] = {}
    for number, page in sorted(pages):
        for name, text, kind, samples in orjson.loads(page):
            family = families.setdefault(name, Metric(name, text, kind))
            for sample, labels, value in samples:
                family.add_sample(sample, {"worker": str(number), **labels}, value)
    return list(families.values())


def add_aggregate(app: FastAPI, aggregate: WorkerAggregate, recorder: Recorder) -> None:
    """Add /healthz and /metrics."""
    own, redactor, secret = whose(recorder), recorder.redactor, store_secret(recorder.store.path, PROVING)
    named = {"store": own.store} | ({"start": own.start} if own.start else {})

    @app.get("/healthz")
    async def healthz(request: Request, response: Response) -> Json:
        details = await aggregate.health() | named
        if (word := request.headers.get(ASKS)) is not None:
            response.headers[PROVES] = proof(secret, word, own)
        failing = details["status"] != OK
        response.status_code = 503 if failing else 200
        if not sees_details(caller_of(request)):
            return {"status": "failing" if failing else OK}
        return redactor.fields(details)

    @app.get("/metrics")
    async def page() -> Response:
        return await aggregate.metrics()


NAMED_BYTES = 1 << 16
"""A body that names weights is small."""


def whose(recorder: Recorder) -> ProxyIdentity:
    """Whose this proxy is."""
    return ProxyIdentity(recorder.store.store_id, recorder.run, os.environ.get(START, ""))


def only_for(own: ProxyIdentity) -> Callable[[Request], Awaitable[None]]:
    """A check that refuses control of the engine for another run, by a header or by its weights' name."""

    async def check(request: Request) -> None:
        wanted = [ProxyIdentity.of_header(request.headers.get(FOR, ""))]
        if request.method == "POST" and len(body := await request.body()) <= NAMED_BYTES:
            wanted += [ProxyIdentity(run=run) for run in _runs_named(body)]
        for owner in wanted:
            if (why := owner.refuses(own)) is not None:
                text = f"this proxy {why}: give the training its own proxy's address, or this run's name"
                raise RequestError(409, "other_run", text)

    return check


def _runs_named(body: bytes) -> list[str]:
    """The runs of which a body names weights."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    names = [fields.get(key) for key in ("weight_version", "new_version")] if isinstance(fields, dict) else []
    return [named.run for name in names if (named := read_name(name)) is not None]
