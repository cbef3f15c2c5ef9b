"""The service's routes: those of the Tinker API, under /api/v1."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import orjson
import pyarrow as pa
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.errors import add_error_replies
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import ANY, Keys, Role, Rule, Rules
from rollbook.edge.web_pages import AllowedHosts
from rollbook.service.downloads import ROUTE as DOWNLOADS
from rollbook.service.requests import (
    Body,
    CreateModel,
    CreateSampler,
    CreateSession,
    Ending,
    LoadState,
    LoadWeights,
    OfModel,
    OfRequest,
    OfSession,
    OptimStep,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Unusable,
    names_model,
    read_body,
    read_operation,
)
from rollbook.service.rest import PREFIX, Answer, RestRoutes, caller_name
from rollbook.service.service import TrainingService
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.train.tenants.operations import LOAD, SAVE, SAVE_EXTERNAL, SAVE_FOR_SAMPLER, STEP

Accept = Callable[[Body, str | None], Awaitable[Json]]
"""Accepts what a caller sent."""
PROTOBUF = "application/x-protobuf"
MOST_SENT, MOST_JSON = 64 << 20, 1 << 20
"""Bytes of any body as it is sent, and of one without its content encoding."""
MOST: Mapping[str, int] = {"forward_backward": 128 << 20, "asample": 16 << 20, "telemetry": MOST_SENT}
"""Route -> bytes of its body without its content encoding, where it may have more."""
PART = 1 << 20
"""Bytes that are inflated in one go."""
AT_ONCE = 2
"""Bodies with a content encoding that are in memory at once: a few bytes may stand for many."""
TENANTS = frozenset({Role.operator, Role.writer})
RULES = Rules(
    (
        Rule("GET", f"{PREFIX}/healthz", TENANTS, open=True),
        Rule("GET", f"{PREFIX}/{DOWNLOADS}/{{path:path}}", TENANTS, open=True),  # addresses are signed
        Rule(ANY, f"{PREFIX}/{{path:path}}", TENANTS, local=True),
    ),
    Rule(ANY, "", frozenset({Role.operator}), local=True),
)
FLAGS: Json = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""What clients are told of this server; sizes stay as they have them."""
DYNAMIC_FLAGS: Json = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


def build_service_app(service: TrainingService, keys: Keys, mine: AllowedHosts) -> FastAPI:
    """The application; it starts and stops the service.

    Args:
        mine: the hosts that requests may be meant for.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        looking = asyncio.create_task(keys.follow())
        yield
        looking.cancel()
        await service.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    bodies, at_once = BodyBudget(MOST_SENT), asyncio.Semaphore(AT_ONCE)
    for method, path, answer in (*_Routes(service).all(), *RestRoutes(service).all(), *_refusals()):
        route = _route(answer, service.current, bodies, at_once, MOST.get(path, MOST_JSON))
        app.add_route(f"{PREFIX}/{path}", route, methods=[method])
    app.add_route("/metrics", _metrics_page(service), methods=["GET"])
    add_error_replies(app, service.metrics.refused, _error_body)
    # No trajectory has a key here: nobody knows the secret that would make one.
    guard = Guard(keys, RULES, "", secrets.token_bytes() if keys.configured else None)
    add_guards(app, guard, mine, service.metrics.failed, _error_body)
    return app


class _Routes:
    """What each route answers; the caller is who the guard let in."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def all(self) -> list[tuple[str, str, Answer]]:
        """(method, path, answer) of each."""
        service = self._service
        return [
            ("POST", "client/config", self._flags),
            ("POST", "client/dynamic_config", self._flags),
            ("GET", "healthz", self._healthy),
            ("GET", "get_server_capabilities", self._capabilities),
            ("POST", "create_session", self._open_session),
            ("POST", "session_heartbeat", self._heartbeat),
            ("POST", "sessions/{session_id}/finish", self._end_session),
            ("POST", "telemetry", self._telemetry),
            ("POST", "get_info", self._info),
            ("POST", "create_model", self._create),
            ("POST", "load_weights", self._load),
            ("POST", "forward_backward", self._pass),
            ("POST", STEP, self._operation(OptimStep, STEP, service.step)),
            ("POST", SAVE, self._operation(SaveWeights, SAVE, service.save)),
            (
                "POST",
                SAVE_FOR_SAMPLER,
                self._operation(SaveForSampler, SAVE_FOR_SAMPLER, service.save_for_sampler),
            ),
            ("POST", SAVE_EXTERNAL, self._operation(SaveExternal, SAVE_EXTERNAL, service.save_external)),
            ("POST", "create_sampling_session", self._open_sampler),
            ("GET", "samplers/{sampler_id}", self._sampler),
            ("POST", "asample", self._sample),
            ("POST", "cancel_future", self._cancel),
            ("POST", "retrieve_future", self._result),
        ]

    async def _flags(self, request: Request, _: bytes) -> Json:
        return FLAGS if request.url.path.endswith("/config") else DYNAMIC_FLAGS

    async def _healthy(self, _: Request, __: bytes) -> Json:
        return {"status": "ok"}

    async def _capabilities(self, _: Request, __: bytes) -> Json:
        return self._service.capabilities()

    async def _open_session(self, request: Request, body: bytes) -> Json:
        sent, once = read_body(CreateSession, body), request.headers.get("x-idempotency-key")
        session_id = await self._service.open_session(sent, once, caller_name(request))
        return {"type": "create_session", "session_id": session_id}

    async def _heartbeat(self, request: Request, body: bytes) -> Json:
        self._service.alive(read_body(OfSession, body).session_id, caller_name(request))
        return {"type": "session_heartbeat"}

    async def _end_session(self, request: Request, body: bytes) -> Response:
        reason = read_body(Ending, body).model_dump(mode="json")
        await self._service.end_session(request.path_params["session_id"], reason, caller_name(request))
        return Response(status_code=204)

    async def _telemetry(self, _: Request, __: bytes) -> Json:
        return {"status": "accepted"}  # what a client says of itself here is not kept: it may hold its key

    async def _info(self, request: Request, body: bytes) -> Json:
        return self._service.described(read_body(OfModel, body).model_id, caller_name(request))

    async def _create(self, request: Request, body: bytes) -> Json:
        return await self._service.create(read_body(CreateModel, body), caller_name(request))

    async def _load(self, request: Request, body: bytes) -> Json:
        if not names_model(body):
            return await self._service.load(read_body(LoadWeights, body), caller_name(request))
        return await self._operation(LoadState, LOAD, self._service.load_into)(request, body)

    async def _pass(self, request: Request, body: bytes) -> Json:
        return await self._service.accept_pass(body, caller_name(request))

    def _operation(
        self, kind: type[Body], name: str, accept: Accept[Body]
    ) -> Callable[[Request, bytes], Awaitable[Json]]:
        """Accepts an operation of a model: also one that cannot be done, and fails when its number comes."""

        async def answer(request: Request, body: bytes) -> Json:
            sent = read_operation(kind, body)
            if isinstance(sent, Unusable):
                return await self._service.refuse(sent, name, caller_name(request))
            return await accept(sent, caller_name(request))

        return answer

    async def _open_sampler(self, request: Request, body: bytes) -> Json:
        sampler_id = await self._service.samplers.open(read_body(CreateSampler, body), caller_name(request))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _sampler(self, request: Request, _: bytes) -> Json:
        return self._service.samplers.described(request.path_params["sampler_id"], caller_name(request))

    async def _sample(self, request: Request, body: bytes) -> Json:
        return await self._service.samplers.accept(read_body(Sample, body), caller_name(request))

    async def _cancel(self, request: Request, body: bytes) -> Response:
        await self._service.samplers.cancel(read_body(OfRequest, body).request_id, caller_name(request))
        return Response(status_code=204)

    async def _result(self, request: Request, body: bytes) -> Response:
        """How an operation ended; 408, which a client repeats at once and in silence, if it did not yet."""
        request_id = read_body(OfRequest, body).request_id
        ended = await self._service.result(request_id, caller_name(request))
        if ended is None:
            waits = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return _json(waits | {"queue_state_reason": "operations before it are under way"}, 408)
        if ended.error is not None:
            return _json(ended.error)
        assert ended.result is not None
        if (encoded := ended.result.get("protobuf")) is not None:
            sent = BackgroundTask(self._service.answered, request_id)
            return Response(base64.b64decode(encoded), media_type=PROTOBUF, background=sent)
        return _json(ended.result)


NOT_SERVED = (
    ("POST", "create_custom_loss", "a loss that runs on the server"),
    ("PUT", "sessions/{session_id}/project", "moving a session to another project"),
    ("GET", "sessions/{session_id}/trace_export", "a session as a trace"),
)
"""Routes of the API that are refused by name."""


def _metrics_page(service: TrainingService) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return page


def _refusals() -> list[tuple[str, str, Answer]]:
    return [(method, path, _refusal(path, why)) for method, path, why in NOT_SERVED]


def _refusal(path: str, what: str) -> Answer:
    async def refuse(_: Request, __: bytes) -> Json:
        raise RequestError(
            400, "not_supported", f"{path}: {what} is not served yet: docs/service.md lists what is"
        )

    return refuse


def _route(
    answer: Answer,
    current: Callable[[], Awaitable[None]],
    bodies: BodyBudget,
    at_once: asyncio.Semaphore,
    most: int,
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        async with bodies.body(request, most) as body:
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            await current()
            if encoding == "identity":
                reply = await answer(request, body)
            else:
                async with at_once:
                    inflated = await run_in_threadpool(_inflated, body, encoding, most)
                    reply = await answer(request, inflated)
        return reply if isinstance(reply, Response) else _json(reply)

    return route


def _json(body: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error_body(path: str, status: int, code: str, message: str) -> Json:
    return {"detail": message, "code": code}


def _inflated(body: bytes, encoding: str, most: int) -> bytes:
    """A body without its content encoding, which may be zstd.

    Raises:
        RequestError: 400, it is not what its encoding says; 413, it is too large; 415, it has another one.
    """
    if encoding != "zstd":
        raise RequestError(
            415, "unsupported_encoding", f"content-encoding {encoding[:40]!r}: send zstd or none"
        )
    parts, size = list[bytes](), 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as reader:
            while size <= most and (part := reader.read(PART)):
                parts.append(part)
                size += len(part)
    except OSError as error:
        raise RequestError(400, "bad_encoding", f"the body is no zstd: {error}") from None
    if size > most:
        raise RequestError(413, "body_too_large", f"the body has more than {most} bytes: send less at once")
    return b"".join(parts)
