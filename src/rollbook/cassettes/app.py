"""A cassette as an HTTP server: OpenAI's and Anthropic's endpoints, answered from recorded
trajectories.

Nothing is recorded. What an agent reports of its trajectory (its end, rewards, labels) is accepted
and discarded, so that a program which records itself runs unchanged. Requests that were not
recorded may be passed on to a real engine, byte for byte. Which requests came is reported for
machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import unquote

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollbook.cassettes.asked import read_request
from rollbook.cassettes.cassette import Cassette, Hit, Miss
from rollbook.cassettes.replies import streamed_reply, whole_reply
from rollbook.cassettes.tape import RecordedRequest
from rollbook.edge.bodies import BodyBudget
from rollbook.edge.errors import add_error_replies
from rollbook.edge.forwarding import end_to_end
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import Keys, sent_key, trajectory_key
from rollbook.edge.listening import Announce, serve_alone
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.access import ROUTES
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.registry import APIS, error_body
from rollbook.ingest.fields import json_object
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.identity import check_said_once, identify, split_path
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.planning import retry_count
from rollbook.ingest.upstream.paths import Upstream
from rollbook.store.errors import EngineError, RequestError
from rollbook.store.events import Json
from rollbook.store.ids import new_id
from rollbook.store.redaction import shown

NOT_RECORDED = "not_recorded"
"""Code of the error that a request gets which is not in the recording."""
HEADER = "x-rollbook-cassette"
"""Says where a reply is from: recorded, repeated (that answer was given before) or engine."""
Told = Callable[[Hit | Miss], None]


@dataclass(frozen=True, slots=True, eq=False)
class CassetteOptions:
    """How a cassette answers.

    Attributes:
        engine: what answers a request that was not recorded; None: it is refused.
        timing: replies take as long as they took when they were recorded.
        tokenizer: for the texts of tokens; None: no reply shows logprobs.
        own: hosts that requests may be meant for.
        told: called for each request, once it is known whether it was recorded.
    """

    engine: EngineBehind | None = None
    timing: bool = False
    tokenizer: ChatTokenizer | None = None
    own: AllowedHosts = field(default_factory=AllowedHosts)
    told: Told = lambda _: None


def build_cassette_app(cassette: Cassette, options: CassetteOptions | None = None) -> FastAPI:
    """The server as an ASGI application, which needs no lifespan."""
    options = options or CassetteOptions()
    app = FastAPI(title="Rollbook cassette")
    add_error_replies(app, lambda code: None, error_body)
    routes = _Routes(cassette, options, BodyBudget())
    app.add_route("/cassette", routes.state, methods=["GET"])
    app.add_route("/cassette/rewind", routes.rewind, methods=["POST"])
    app.add_route("/v1/trajectories", routes.opened, methods=["POST"])
    app.add_route("/v1/trajectories/{name:path}/{what}", routes.remarked, methods=["POST"])
    app.add_route("/v1/preferences", routes.remarked, methods=["POST"])
    for prefix in ("", "/t/{said:path}"):
        for path, api in APIS.items():
            app.add_route(prefix + path, routes.answer, methods=["POST"])
            if api.ids is not None:
                app.add_route(
                    f"{prefix}{path}/{{response_id}}", partial(routes.response, api), methods=["GET"]
                )
        app.add_route(prefix + "/v1/models", routes.models, methods=["GET"])
        app.add_route(prefix + "/v1/models/{model:path}", routes.models, methods=["GET"])
        app.add_route(prefix + "/v1/{path:path}", routes.other, methods=["GET", "POST", "DELETE"])
    add_guards(app, Guard(Keys(), ROUTES, "", None), options.own, lambda error: None, error_body)
    return app


@dataclass(slots=True, eq=False)
class _Routes:
    cassette: Cassette
    options: CassetteOptions
    room: BodyBudget

    async def answer(self, request: Request) -> Response:
        """A request for a completion."""
        began_s = time.monotonic()
        from_path, path = _address(request)
        api = APIS.get(path)
        if api is None:
            raise RequestError(404, "not_found", f"{path}: write /t/ID/v1/..., with the path as it is")
        async with self.room.plain(request) as raw:
            body = json_object(raw)
        name = identify(from_path, request.headers, body, sent_key(request.headers)).name
        incoming = read_request(api, body, self.cassette.earlier, self.cassette.renamed)
        outcome = self.cassette.answer(incoming, name, retry=retry_count(request) > 0)
        self.options.told(outcome)
        if isinstance(outcome, Miss):
            return await self._missed(request, path, raw, outcome)
        wait_s = outcome.request.took_s - (time.monotonic() - began_s) if self.options.timing else 0.0
        return await self._recorded(api, incoming.call, outcome, max(wait_s, 0.0))

    async def _recorded(self, api: AgentApi, call: ModelCall, hit: Hit, wait_s: float) -> Response:
        """The recorded answer, over so many seconds."""
        request, headers = hit.request, _headers(hit)
        if call.logprobs and self.options.tokenizer is None and request.failure is None:
            headers["x-rollbook-not-honoured"] = "logprobs"
        if request.failure is None and call.stream:
            packets = list(streamed_reply(api, call, request, self.options.tokenizer))
            headers |= {"cache-control": "no-cache"}
            return StreamingResponse(
                _paced(packets, wait_s), headers=headers, media_type="text/event-stream; charset=utf-8"
            )
        await asyncio.sleep(wait_s)
        if request.failure is not None:
            failure = request.failure
            body = failure.body or api.error(failure.status, failure.code, failure.message)
            return JSONResponse(body, failure.status, headers)
        content = whole_reply(api, call, request, self.options.tokenizer)
        return Response(content, headers=headers, media_type="application/json")

    async def _missed(self, request: Request, path: str, raw: bytes, missed: Miss) -> Response:
        """The answer to what was not recorded: an engine's, or an error that says what differs."""
        if self.options.engine is not None:
            return await self.options.engine.answer(request, path, raw, {HEADER: "engine"})
        near = missed.near
        text = f"this request was not recorded; {near.text if near else 'nothing was'}"
        body = error_body(path, 404, NOT_RECORDED, text)
        if near is not None:
            body["error"]["nearest"] = near.as_json()
        return Response(orjson.dumps(body), 404, {"x-should-retry": "false"}, "application/json")

    async def response(self, api: AgentApi, request: Request) -> Response:
        """A recorded response, by its id."""
        response_id = request.path_params["response_id"]
        assert api.ids is not None
        turn_id = api.ids.turn_of(self.cassette.renamed(response_id))
        recorded = next((r for r in self.cassette.requests if turn_id in r.turn_ids and r.turns), None)
        if recorded is None:
            raise RequestError(404, "unknown_response", f"no response {response_id!r} in the recording")
        content = whole_reply(api, recorded.asked.call, recorded, self.options.tokenizer)
        return Response(content, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """The models that were asked for when this was recorded."""
        named = [request.path_params["model"]] if "model" in request.path_params else self.cassette.models
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "rollbook"} for name in named]
        if "model" in request.path_params:
            return JSONResponse(models[0])
        return JSONResponse({"object": "list", "data": models, "first_id": None, "has_more": False})

    async def other(self, request: Request) -> Response:
        """A request of another kind, which no recording holds."""
        _, path = _address(request)
        if self.options.engine is None:
            text = f"{request.method} {path}: a cassette answers requests for completions and lists models"
            raise RequestError(404, "not_served", text)
        async with self.room.plain(request) as raw:
            return await self.options.engine.answer(request, path, raw, {HEADER: "engine"})

    # What an agent says of its trajectory ---------------------------------------------------------

    async def opened(self, request: Request) -> Response:
        """A trajectory that is opened: its name, and a key that names it."""
        async with self.room.plain(request) as raw:
            name = str(json_object(raw).get("id") or new_id())
        body = {"id": name, "trajectory_id": new_id(), "api_key": trajectory_key(name, "", None)}
        return JSONResponse(body, 201, {HEADER: "not recorded"})

    async def remarked(self, request: Request) -> Response:
        """An end, a reward, a label or a preference: accepted, and not recorded."""
        async with self.room.plain(request) as raw:
            json_object(raw)
        name, what = request.path_params.get("name"), request.path_params.get("what")
        headers = {HEADER: "not recorded"}
        if what == "finish":
            turns = sum(r.name == name for r in self.cassette.requests)
            return JSONResponse({"id": name, "status": "finished", "turns": turns}, 200, headers)
        return JSONResponse({"id": name, "trajectory_id": new_id(), "event_id": new_id()}, 201, headers)

    # What a person asks ---------------------------------------------------------------------------

    async def state(self, request: Request) -> Response:
        """What was asked for so far."""
        return JSONResponse(state_of(self.cassette))

    async def rewind(self, request: Request) -> Response:
        """Begin anew."""
        self.cassette.rewind()
        return JSONResponse(state_of(self.cassette))


def _address(request: Request) -> tuple[Json, str]:
    """(the trajectory's fields in the path, the endpoint's path)"""
    check_said_once(request.headers.raw)
    raw = request.scope.get("raw_path") or request.url.path.encode()
    from_path, path = split_path(raw.decode("latin-1").partition("?")[0])
    return from_path, unquote(path)


def _headers(hit: Hit) -> dict[str, str]:
    request: RecordedRequest = hit.request
    return {
        HEADER: "repeated" if hit.repeated else "recorded",
        f"{HEADER}-answer": f"{hit.answer}/{hit.answers}",
        "x-rollbook-trajectory-id": request.tape,
        "x-rollbook-turn-id": ",".join(request.turn_ids),
    }


async def _paced(packets: list[bytes], over_s: float) -> AsyncIterator[bytes]:
    """Packets spread evenly over a time: the log does not say when each of them came."""
    for packet in packets:
        await asyncio.sleep(over_s / len(packets))
        yield packet


def serve_cassette(
    cassette: Cassette, host: str, port: int, options: CassetteOptions, announce: Announce
) -> None:
    """Serve until interrupted.

    Args:
        announce: called once with the address, before the first request is taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    serve_alone(lambda own: build_cassette_app(cassette, replace(options, own=own)), host, port, announce)


def state_of(cassette: Cassette) -> Json:
    """The trajectories, how many of their requests were asked for, those that were not, and the misses."""
    unused = cassette.unused
    return {
        "trajectories": [
            {"trajectory_id": t.trajectory_id, "name": t.name, "run": t.run} for t in cassette.tapes
        ],
        "requests": len(cassette.requests),
        "used": len(cassette.requests) - len(unused),
        "unused": [place_of(request) for request in unused],
        "misses": [
            {"endpoint": miss.asked.endpoint, "nearest": miss.near.as_json() if miss.near else None}
            for miss in cassette.misses
        ],
    }


def place_of(request: RecordedRequest) -> Json:
    """Where a recorded request is."""
    return {"trajectory": request.name, "trajectory_id": request.tape, "turn": request.number}


CONNECT_S = 10.0


class EngineBehind:
    """Passes requests on, to each of several engines in turn.

    Args:
        upstreams: where they are; at least one.
    """

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._turns = itertools.cycle(upstreams)
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, path: str, raw: bytes, ours: Mapping[str, str]) -> Response:
        """The reply of the next engine, as it comes.

        Args:
            path: the endpoint's, without a trajectory before it.
            raw: the body, without a content encoding.
            ours: headers that are added to the reply's.

        Raises:
            EngineError: it cannot be reached.
        """
        if self._client is None:  # made on the loop that it is used on
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        upstream = next(self._turns)
        headers = upstream.headers(request.headers.raw, path, own_keys=False, plain=False)
        headers.popall("content-encoding", None)
        query = request.scope.get("query_string", b"").decode("latin-1")
        url = upstream.target(path, query)
        outgoing = self._client.build_request(request.method, url, content=raw, headers=[*headers.items()])
        try:
            reply = await self._client.send(outgoing, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = shown(str(error) or type(error).__name__)
            raise EngineError(f"{upstream.url} cannot be reached: {text}") from error
        answer = StreamingResponse(_passed(reply), reply.status_code)
        added = [(name.encode(), value.encode("latin-1")) for name, value in ours.items()]
        answer.raw_headers = [*end_to_end(reply.headers.raw), *added]
        return answer


async def _passed(reply: httpx.Response) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(reply):
        async for data in reply.aiter_raw():
            yield data
