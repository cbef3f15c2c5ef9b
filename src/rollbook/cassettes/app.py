"""A cassette as an HTTP server: OpenAI's and Anthropic's endpoints, answered from recorded
trajectories.

Nothing is recorded. What an agent reports of its trajectory (its end, rewards, labels) is accepted
and discarded, so that a program which records itself runs unchanged. Requests that were not
recorded may be passed on to a real engine, byte for byte. Which requests came is reported for
machines.

Writes a recorded answer as the bytes of the API and the kind of reply that are requested now.

An answer is written by the same code as the proxy's own. Where it came from an upstream, through
the API that it is requested through now, what else the upstream said replaces what that code
writes: ids, the model's name, usage, a response's items, a message's blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from tokenizers import Tokenizer, models

from rollbook.cassettes.cassette import Cassette, Hit, Miss
from rollbook.cassettes.tape import (
    RecordedRequest,
    read_request,
    recorded_blocks,
    recorded_output,
    upstream_ids,
)
from rollbook.edge.bodies import BodyBudget
from rollbook.edge.errors import add_error_replies
from rollbook.edge.forwarding import end_to_end
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import Keys, sent_key, trajectory_key
from rollbook.edge.listening import Announce, serve_alone
from rollbook.edge.server_sent_events import DONE, event, events_of
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.access import ROUTES
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.messages import PATH as MESSAGES
from rollbook.ingest.endpoints.registry import APIS, error_body
from rollbook.ingest.endpoints.responses_form import PATH as RESPONSES
from rollbook.ingest.fields import json_object
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.tokens.template_traits import TemplateTraits
from rollbook.ingest.tokens.text_encoder import TextEncoder
from rollbook.ingest.trajectories.identity import check_said_once, identify, split_path
from rollbook.ingest.turns.in_flight import CompletedTurn
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
        on_request: called for each request, once it is known whether it was recorded.
    """

    engine: EngineBehind | None = None
    timing: bool = False
    tokenizer: ChatTokenizer | None = None
    own: AllowedHosts = field(default_factory=AllowedHosts)
    on_request: Told = lambda _: None


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
        self.options.on_request(outcome)
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


MOST_PIECES = 64
"""Pieces in which the text of one choice is streamed: the log does not say how it came."""
_NOT_SAID = frozenset(["choice", "error", "prompt_token_ids", "token_ids", "logprobs"])
"""What is kept of an upstream's reply that is no field of the reply itself."""
_OF_THE_BEGINNING = ("id", "model", "created_at")


def whole_reply(
    api: AgentApi, call: ModelCall, request: RecordedRequest, tokenizer: ChatTokenizer | None
) -> bytes:
    """A recorded answer as one object.

    Args:
        tokenizer: for the texts of tokens; None: logprobs are left out.
    """
    call, words = _spelled(call, tokenizer)
    turns = list(request.turns)
    body = api.reply(call, turns, words)
    if _passed_on(api, request):
        body = _WHOLE.get(api.path, _whole_choices)(body, turns)
    return orjson.dumps(body)


def streamed_reply(
    api: AgentApi, call: ModelCall, request: RecordedRequest, tokenizer: ChatTokenizer | None
) -> Iterator[bytes]:
    """A recorded answer as the packets of a stream: the beginning, each piece of text, and the rest.

    Args:
        tokenizer: as for `whole_reply`.
    """
    call, words = _spelled(call, tokenizer)
    turns = list(request.turns)
    writer = api.writer(call, [turn.turn_id for turn in turns], words)
    packets = [writer.begin()]
    for choice, turn in enumerate(turns):
        tokens = _tokens(turn) if call.logprobs else []
        for reasoning, content in _pieces(turn):
            packets.append(writer.piece(choice, reasoning, content, tokens))
            tokens = []
    packets.append(writer.end(turns))
    named = api.path in (RESPONSES, MESSAGES)
    change = _STREAMED.get(api.path, _chunk)
    for packet in packets:
        if packet and _passed_on(api, request):
            packet = _changed(packet, functools.partial(change, turns), named=named)
        if packet:
            yield packet


@functools.cache
def _no_tokenizer() -> ChatTokenizer:
    """A tokenizer without a vocabulary, for replies that show no tokens."""
    template = compile_template("")
    return ChatTokenizer(TextEncoder(Tokenizer(models.BPE())), template, {}, (), 0, TemplateTraits(), "", "")


def _spelled(call: ModelCall, tokenizer: ChatTokenizer | None) -> tuple[ModelCall, ChatTokenizer]:
    return (replace(call, logprobs=False), _no_tokenizer()) if tokenizer is None else (call, tokenizer)


def _tokens(turn: CompletedTurn) -> list[tuple[int, float]]:
    done = turn.completed
    if done.logprobs is None:
        return []
    return list(zip(done.completion_ids.tolist(), done.logprobs.tolist(), strict=True))


def _pieces(turn: CompletedTurn) -> Iterator[tuple[str, str]]:
    """(reasoning, content) piece by piece; a single empty piece where there is neither."""
    reasoning, content = turn.reply.get("reasoning_content") or "", turn.reply.get("content") or ""
    pieces = [*((part, "") for part in _words(reasoning)), *(("", part) for part in _words(content))]
    yield from pieces or [("", "")]


def _words(text: str) -> list[str]:
    words = re.findall(r"\s*\S+|\s+$", text)
    each = -(-len(words) // MOST_PIECES) or 1
    return ["".join(words[at : at + each]) for at in range(0, len(words), each)]


# What an upstream said ---------------------------------------------------------------------------


def _passed_on(api: AgentApi, request: RecordedRequest) -> bool:
    return bool(request.turns[0].completed.upstream) and request.asked.endpoint == api.path


def _facts(turn: CompletedTurn) -> Json:
    return {name: value for name, value in turn.completed.upstream.items() if name not in _NOT_SAID}


def _choice_facts(turn: CompletedTurn) -> Json:
    choice = turn.completed.upstream.get("choice")
    return choice if isinstance(choice, dict) else {}


def _whole_choices(body: Json, turns: list[CompletedTurn]) -> Json:
    for choice, turn in zip(body["choices"], turns, strict=True):
        facts = dict(_choice_facts(turn))
        if "tool_calls" in facts:
            choice["message"]["tool_calls"] = facts.pop("tool_calls")
        choice |= facts
    return {"choices": body["choices"]} | _facts(turns[0])


def _whole_response(body: Json, turns: list[CompletedTurn]) -> Json:
    # An upstream says the request's instructions and tools again, which are not recorded twice.
    echoed = {name: body[name] for name in ("instructions", "tools")}
    output = recorded_output(turns[0].completed) or body["output"]
    return echoed | _facts(turns[0]) | {"output": output}


def _whole_message(body: Json, turns: list[CompletedTurn]) -> Json:
    content = recorded_blocks(turns[0].completed) or body["content"]
    return {"type": "message", "role": "assistant", "content": content} | _facts(turns[0])


_WHOLE: dict[str, Callable[[Json, list[CompletedTurn]], Json]] = {
    RESPONSES: _whole_response,
    MESSAGES: _whole_message,
}


def _changed(packet: bytes, change: Callable[[Json], Json], *, named: bool) -> bytes:
    """Events of a stream, each changed."""
    events = [change(payload) for payload in events_of(packet)]
    written = b"".join(event(payload, payload["type"] if named else None) for payload in events)
    return written + (DONE if packet.endswith(DONE) else b"")


def _chunk(turns: list[CompletedTurn], chunk: Json) -> Json:
    facts = {name: value for name, value in _facts(turns[0]).items() if name not in ("usage", "object")}
    usage = _facts(turns[0]).get("usage")
    if usage is not None and chunk.get("usage") is not None:
        facts["usage"] = usage
    for choice in chunk["choices"]:
        if choice["finish_reason"] is not None:
            choice_facts = _choice_facts(turns[choice["index"]])
            choice |= {name: value for name, value in choice_facts.items() if name != "tool_calls"}
    return chunk | facts


def _response_event(turns: list[CompletedTurn], payload: Json) -> Json:
    done = turns[0].completed
    names = dict(upstream_ids(done))
    payload = _renamed(payload, names)
    items = {item.get("id"): item for item in recorded_output(done)}
    if payload["type"] == "response.output_item.done":
        payload["item"] = items.get(payload["item"]["id"], payload["item"])
    response = payload.get("response")
    if response is not None and response["status"] == "in_progress":
        facts = _facts(turns[0])
        payload["response"] = response | {name: facts[name] for name in _OF_THE_BEGINNING if name in facts}
    elif response is not None:
        payload["response"] = _whole_response(response, turns)
    return payload


def _message_event(turns: list[CompletedTurn], payload: Json) -> Json:
    facts, done = _facts(turns[0]), turns[0].completed
    signatures = [block["signature"] for block in recorded_blocks(done) if block.get("signature")]
    if signatures:
        payload = _renamed(payload, {turns[0].turn_id: signatures[0]})
    if payload["type"] == "message_start":
        begun = {k: v for k, v in facts.items() if k not in ("stop_reason", "stop_sequence")}
        payload["message"] |= begun
    elif payload["type"] == "message_delta":
        payload["delta"] |= {k: facts[k] for k in ("stop_reason", "stop_sequence") if k in facts}
        payload["usage"] = facts.get("usage", payload["usage"])
    return payload


_STREAMED: dict[str, Callable[[list[CompletedTurn], Json], Json]] = {
    RESPONSES: _response_event,
    MESSAGES: _message_event,
}


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The value, with each text that is a key of `names` replaced."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {name: _renamed(item, names) for name, item in value.items()}
    return value
