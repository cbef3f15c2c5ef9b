"""The recording proxy: OpenAI chat completions in, events and an engine's answer out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from rollbook.ingest.engines.engine import Engine
from rollbook.ingest.events_api import add_event_routes
from rollbook.ingest.recorder import LiveTrajectory, Recorder
from rollbook.ingest.requests import (
    AssignReward,
    ChatRequest,
    FinishTrajectory,
    OpenTrajectory,
    check_messages,
    check_split,
)
from rollbook.ingest.rewards import RESPONSE_PREFIX, assigned_reward
from rollbook.ingest.turns import AnsweredTurn, TurnTaker
from rollbook.store.errors import EngineError, RequestError, WriteFailedError
from rollbook.store.events import Json, PolicyActivated

Model = TypeVar("Model", bound=BaseModel)


class DeliveredResponse(Response):
    """A JSON response that tells when its last byte was handed to a client that was still there."""

    media_type = "application/json"

    def __init__(self, content: Json, headers: dict[str, str], sent: Callable[[bool], None]) -> None:
        super().__init__(orjson.dumps(content), headers=headers)
        self._sent = sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send; `sent(True)` only if the client had not gone before."""
        gone = await Request(scope, receive).is_disconnected()
        delivered = False
        try:
            await super().__call__(scope, receive, send)
            delivered = not gone
        finally:
            self._sent(delivered)


def build_app(recorder: Recorder, engine: Engine) -> FastAPI:
    """The proxy as an ASGI application; it starts and stops the engine, and closes the recorder."""
    taker = TurnTaker(recorder, engine)

    async def activated(version: int, digest: str, path: Path) -> None:
        policy = getattr(engine, "policy", "actor")
        record = PolicyActivated(policy, version, engine.name, digest, str(path))
        await recorder.write(record)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start(activated)
        yield
        await engine.close()
        streams.close()
        recorder.close()

    app = FastAPI(title="Rollbook", lifespan=lifespan)
    _add_errors(app)
    _add_trajectory_routes(app, recorder)
    _add_chat_routes(app, recorder, taker)
    _add_health(app, recorder, engine)
    streams = app.state.streams = add_event_routes(app, recorder)
    control = engine.control()
    if control is not None:
        app.include_router(control, prefix="/engine")
    return app


def _add_health(app: FastAPI, recorder: Recorder, engine: Engine) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> Json:
        failure = recorder.writer.failure or engine.failure()
        response.status_code = 503 if failure else 200
        return {
            "status": failure or "ok",
            "run": recorder.run,
            "lane": recorder.lane,
            "engine": engine.name,
            "policy_version": engine.policy_version(),
        }


def _add_trajectory_routes(app: FastAPI, recorder: Recorder) -> None:
    @app.post("/v1/trajectories", status_code=201)
    async def open_trajectory(request: Request) -> Json:
        live = recorder.draft(await _read(request, OpenTrajectory))
        recorder.record_opening(live)
        await recorder.settle()
        return {"id": live.opened.name, "trajectory_id": live.opened.trajectory_id}

    @app.post("/v1/trajectories/{name:path}/finish")
    async def finish(name: str, request: Request) -> Json:
        turns = await recorder.finish(name, await _read(request, FinishTrajectory))
        return {"id": name, "status": "finished", "turns": turns}

    @app.post("/v1/trajectories/{name:path}/rewards", status_code=201)
    async def reward(name: str, request: Request) -> Json:
        body = await _read(request, AssignReward)
        opened = recorder.known(name).opened
        await recorder.settle()
        # Of a finished trajectory only the name is in memory; its turns and rewards are read from the log.
        trajectory = await asyncio.to_thread(recorder.store.trajectory, opened.trajectory_id)
        if trajectory is None:
            text = f"trajectory {name!r} is no longer in the store: its events were dropped by retention"
            raise RequestError(404, "trajectory_dropped", text)
        [event] = await recorder.write(assigned_reward(trajectory, body))
        return {"id": name, "trajectory_id": opened.trajectory_id, "event_id": event.event_id}


def _add_chat_routes(app: FastAPI, recorder: Recorder, taker: TurnTaker) -> None:
    @app.post("/t/{name:path}/v1/chat/completions")
    async def chat_by_path(name: str, request: Request) -> Response:
        header = _header(request, "trajectory")
        if header not in (None, name):
            text = f"the path names trajectory {name!r}, the header {header!r}: send one of them"
            raise RequestError(400, "trajectory_conflict", text)
        return await _chat(recorder, taker, name, request)

    @app.post("/v1/chat/completions")
    async def chat_by_header(request: Request) -> Response:
        name = _header(request, "trajectory")
        if not name:
            text = (
                "no trajectory named: use the base_url http://HOST:PORT/t/ID/v1, or send the header "
                "X-Rollbook-Trajectory"
            )
            raise RequestError(400, "no_trajectory", text)
        return await _chat(recorder, taker, name, request)


async def _chat(recorder: Recorder, taker: TurnTaker, name: str, request: Request) -> Response:
    body = _json_object(await request.body())
    chat = _validated(ChatRequest, body)
    check_messages(chat.messages)
    if chat.stream:
        text = "stream=true: this release answers without streaming; send stream=false"
        raise RequestError(400, "stream_not_served", text)
    wanted = _wanted(name, request)
    live = recorder.find(name) or recorder.draft(wanted)
    _check_unchanged(live, wanted, request)
    if live.finished:
        text = f"trajectory {name!r} is finished: open another for more turns"
        raise RequestError(409, "trajectory_finished", text)
    live.running += 1
    try:
        answered = await taker.take(live, chat, body)
        live.sending += 1
    finally:
        live.running -= 1

    def sent(delivered: bool) -> None:
        if delivered:
            recorder.mark_delivered(live, answered.turn_id, "sent")
        live.sending -= 1
        if not live.sending:
            live.settled.set()

    headers = {"x-rollbook-trajectory-id": live.opened.trajectory_id}
    if answered.not_honoured:
        # Field names are the client's: quoted, whatever they hold is a valid header.
        headers["x-rollbook-not-honoured"] = ",".join(quote(name) for name in answered.not_honoured)
    if answered.policy_version is not None:
        headers["x-rollbook-policy-version"] = str(answered.policy_version)
    return DeliveredResponse(_completion(chat, answered), headers, sent)


def _wanted(name: str, request: Request) -> OpenTrajectory:
    """The trajectory that the path and headers speak of."""
    group, task = _header(request, "group"), _header(request, "task")
    split = check_split(_header(request, "split") or "train")
    return _validated(OpenTrajectory, {"id": name, "group": group, "task": task, "split": split})


def _header(request: Request, field: str) -> str | None:
    """A Rollbook header's value. HTTP libraries send and give Latin-1; people write UTF-8."""
    value = request.headers.get(f"x-rollbook-{field}")
    try:
        return value if value is None else value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def _check_unchanged(live: LiveTrajectory, wanted: OpenTrajectory, request: Request) -> None:
    """Refuse a header that says otherwise than the trajectory was opened with.

    Raises:
        RequestError: 409, naming both values.
    """
    for field in ("group", "task", "split"):
        sent, opened = getattr(wanted, field), getattr(live.opened, field)
        if f"x-rollbook-{field}" in request.headers and sent != opened:
            text = f"trajectory {wanted.id!r} was opened with {field} {opened!r}, not {sent!r}"
            raise RequestError(409, "trajectory_conflict", text)


def _completion(chat: ChatRequest, answered: AnsweredTurn) -> Json:
    """The reply in OpenAI's form, with every field that some client insists on."""
    choice = {
        "index": 0,
        "message": answered.reply.message | {"refusal": None},
        "logprobs": None,
        "finish_reason": answered.reply.finish_reason,
    }
    usage = {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.completion_tokens,
        "total_tokens": answered.prompt_tokens + answered.completion_tokens,
    }
    return {
        "id": RESPONSE_PREFIX + answered.turn_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model or "rollbook",
        "choices": [choice],
        "usage": usage,
    }


# Bodies and errors --------------------------------------------------------------------------


def _json_object(raw: bytes) -> Json:
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(400, "bad_json", "the body must be a JSON object")
    try:
        orjson.dumps([[body]])  # as deep as it gets inside an event
    except orjson.JSONEncodeError as error:
        raise RequestError(400, "bad_json", f"the body cannot be recorded: {error}") from error
    return body


def _validated(model: type[Model], body: Json) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(400, "bad_request", f"{where}: {first['msg']}") from error


async def _read(request: Request, model: type[Model]) -> Model:
    return _validated(model, _json_object(await request.body()))


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    # What will not change by itself must not be tried again.
    final = status in (400, 403, 404, 409, 422) and code != "trajectory_busy"
    retry = {"x-should-retry": "false"} if final else {}
    return Response(orjson.dumps(body), status, retry | (headers or {}), media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return _error(error.status, error.code, error.message)

    @app.exception_handler(EngineError)
    async def engine_error(_: Request, error: EngineError) -> Response:
        return _error(502, "engine_failed", str(error))

    @app.exception_handler(WriteFailedError)
    async def write_failed(_: Request, error: WriteFailedError) -> Response:
        return _error(503, "store_failed", str(error), {"retry-after": "10"})
