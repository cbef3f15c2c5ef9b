"""Routes of the APIs that agents speak, each with a trajectory in its path or without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollbook.ingest.endpoints.chat import ChatCompletions
from rollbook.ingest.endpoints.completions import Completions
from rollbook.ingest.endpoints.history import EarlierTurn
from rollbook.ingest.endpoints.messages import Messages
from rollbook.ingest.endpoints.responses import Responses
from rollbook.ingest.endpoints.responses_wire import turn_of
from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.error_replies import describe
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.guard import caller_of
from rollbook.ingest.http.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import Planned, TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.requests.fields import SamplingFields, json_object
from rollbook.ingest.requests.large_work import beside
from rollbook.ingest.trajectories.identity import Identity, identify
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.images import ImageLinks
from rollbook.ingest.turns.in_flight import InFlightCall
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.request_limits import check_call
from rollbook.ingest.turns.respond import Endpoint, TurnResponse
from rollbook.ingest.turns.retry import retry_count
from rollbook.store.errors import RequestError
from rollbook.store.events import QUARANTINE, Json

ENDPOINTS: Mapping[str, Endpoint] = {
    e.path: e for e in (ChatCompletions(), Completions(), Responses(), Messages())
}


NAMED = 4096
"""Characters of a header that names fields: a client's own names must not make it unreadable."""


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """Answers requests for completions, whichever API they come through."""

    recorder: Recorder
    turn_runner: TurnRunner
    door: FrontDoor
    room: BodyRoom
    metrics: Metrics
    images: ImageLinks
    model_name: str = "rollbook"
    _running: int = field(default=0)

    def add(self, app: FastAPI) -> None:
        """Add the routes; those without a trajectory in the path too."""
        for prefix in ("", "/t/{said:path}"):
            for path in ENDPOINTS:
                app.add_route(prefix + path, self.answer, methods=["POST"])
            app.add_route(prefix + "/v1/messages/count_tokens", self.count, methods=["POST"])
            app.add_route(prefix + "/v1/responses/{response_id}", self.response, methods=["GET"])
            app.add_route(prefix + "/v1/models", self.models, methods=["GET"])
            app.add_route(prefix + "/v1/models/{model:path}", self.models, methods=["GET"])

    async def answer(self, request: Request) -> Response:
        """A completion."""
        said, path, caller = self.door.enter(request)
        endpoint = ENDPOINTS.get(unquote(path))
        if endpoint is None:
            raise RequestError(404, "not_found", f"{path}: write /t/ID/v1/..., with the path as it is")
        self.door.check_running(self._running)
        try:
            # Who sends slowly is not running yet: it would keep those out who have sent.
            async with self.room.plain(request) as raw, self._counted():
                with contextlib.ExitStack() as places:
                    sent = await beside(len(raw), json_object, raw)
                    body = await self.door.redacted(sent, len(raw))
                    identity = self.door.hinted(identify(said, request.headers, body, caller.key))
                    retry = retry_count(request)
                    arrival = await beside(
                        len(raw), Arrival.kept, endpoint.path, raw, sent, body, retry, caller.name
                    )
                    live, call, planned = await self._read(
                        endpoint, identity, body, len(raw), request, places
                    )
                    running = await self._running_call(live, call, arrival, planned)
                running.rests_on.append(self.door.label(live, identity, caller.name))
        except BaseException as error:
            self.metrics.failed(error)
            raise
        live.sending += 1
        return TurnResponse(
            running,
            endpoint,
            self.door.options.keep_alive,
            lambda turns: _headers(live, running, turns),
            lambda turns, delivered: self._sent(live, running, turns, delivered),
            self.turn_runner.abort,
            lambda error: endpoint.error(*describe(error)),
            lambda: self._left(live),
        )

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count a request as running until it fails; one that does not counts until its reply is sent."""
        self.door.check_running(self._running)
        self._running += 1
        try:
            yield
        except BaseException:
            self._running -= 1
            raise

    async def _running_call(
        self, live: LiveTrajectory, call: ModelCall, arrival: Arrival, planned: Planned | None
    ) -> InFlightCall:
        """What answers the request: the one it repeats, whether that still runs or is stored, or its own."""
        earlier = live.known.arrivals.get(arrival.digest) if arrival.retry else None
        if isinstance(earlier, InFlightCall) and not earlier.abandoned:
            self.metrics.retries.labels("joined").inc()
            return earlier
        if isinstance(earlier, tuple):
            self.metrics.retries.labels("replayed").inc()
            running = self.turn_runner.stored(call, await self.recorder.answered(live, earlier))
            running.counted = True
            return running
        # Also where the repeated one is being aborted because nobody waited: half a reply is none.
        running = self.turn_runner.begin(live, call, arrival, planned)
        running.done.add_done_callback(lambda done: self._ended(running, done))
        return running

    def _ended(self, running: InFlightCall, done: asyncio.Future[list[CompletedTurn]]) -> None:
        """Count what nobody is sent."""
        error = done.exception()
        if error is not None:
            self.metrics.failed(error)
        elif running.abandoned:
            self._count(running, done.result(), delivered=False)

    def _count(self, running: InFlightCall, turns: list[CompletedTurn], *, delivered: bool) -> None:
        """Count a request's turns, once however many clients wait for them."""
        if not running.counted:
            running.counted = True
            for turn in turns:
                self.metrics.answered(turn, delivered=delivered)

    async def _read(
        self,
        endpoint: Endpoint,
        identity: Identity,
        body: Json,
        size: int,
        request: Request,
        places: contextlib.ExitStack,
    ) -> tuple[LiveTrajectory, ModelCall, Planned | None]:
        """The trajectory and what is asked. Who names none is told apart by what it goes on from.

        Args:
            places: keeps the place of a trajectory that is new, until it is recorded.
        """
        named = _named_turn(body) if identity.name is None else None
        if named is not None and (found := self.recorder.of_turn(named)) is not None:
            identity = replace(identity, name=found.opened.name)
        known = None
        if identity.name is not None:
            await self.recorder.recall(identity.name)
            known = self.recorder.find(identity.name)
        call = await beside(size, endpoint.read, body, lambda turn_id: _earlier(known, turn_id))
        check_call(call, size, self.door.options.max_body_bytes)
        call = replace(call, messages=await self.images.resolved(call.messages))
        if identity.name is not None and known is None:
            self._running -= 1  # who is held must not keep those out that others wait for
            try:
                await self.door.admit(identity.name, self.door.wanted(identity), request, places)
            finally:
                self._running += 1
        by = caller_of(request).name
        live = await self.door.trajectory(identity, call.messages, size, by)
        while True:
            tree = live.tree
            planned = await self.turn_runner.planned(tree, call, size)
            if planned is None:
                break
            live = await self.door.trajectory(identity, call.messages, size, by)
            if live.tree is tree or not (live.tree.turns or tree.turns):
                break  # else what it goes on from is another one by now
        # From here on nothing waits: a trajectory that is new has been drafted once, and is recorded next.
        return live, call, planned

    def _sent(
        self, live: LiveTrajectory, running: InFlightCall, turns: list[CompletedTurn], delivered: bool
    ) -> None:
        for turn in turns if delivered else ():
            self.recorder.mark_delivered(live, turn.turn_id, "sent")
        self._count(running, turns, delivered=delivered)

    def _left(self, live: LiveTrajectory) -> None:
        self._running -= 1
        live.sent()

    async def count(self, request: Request) -> Response:
        """How many tokens a message's prompt would hold."""
        self.door.enter(request)
        async with self.room.plain(request) as raw:
            return JSONResponse({"input_tokens": await beside(len(raw), self._prompt_length, raw)})

    def _prompt_length(self, raw: bytes) -> int:
        call = Messages().read({"max_tokens": 1} | json_object(raw), lambda _: None)
        check_call(call, len(raw), self.door.options.max_body_bytes)
        tokenizer = self.turn_runner.bridges.tokenizer
        text = tokenizer.render(call.messages, call.tools, generate=True, **call.template_kwargs)
        return len(tokenizer.encode(text))

    async def response(self, request: Request) -> Response:
        """An earlier response, from the log."""
        said, _, caller = self.door.enter(request)
        identity = identify(said, request.headers, {}, caller.key)
        response_id = request.path_params["response_id"]
        turn_id = turn_of(response_id)
        live = None if turn_id is None else self.recorder.of_turn(turn_id)
        other = live is not None and identity.explicit and identity.name != live.opened.name
        if live is None or turn_id is None or other:
            text = f"no response {response_id!r} in an open trajectory"
            raise RequestError(404, "unknown_response", text)
        turns = await self.recorder.answered(live, (turn_id,))
        return JSONResponse(
            Responses().reply(_recorded_call(turns[0]), turns, self.turn_runner.bridges.tokenizer)
        )

    async def models(self, request: Request) -> Response:
        """The model that is served, by its own name; requests may use any."""
        self.door.enter(request)
        version = self.turn_runner.engine.policy_version()
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "rollbook"}
        model |= {
            "policy_version": version,
            "max_model_len": self.turn_runner.bridges.tokenizer.context_length,
        }
        if "model" in request.path_params:
            return JSONResponse(model | {"id": request.path_params["model"]})
        return JSONResponse({"object": "list", "data": [model], "first_id": None, "has_more": False})


def _recorded_call(turn: CompletedTurn) -> ModelCall:
    asked = turn.requested
    return ModelCall(
        asked.wire.get("endpoint", ""),
        [],
        None,
        SamplingFields.model_validate({"model": asked.requested_model}),
        asked.request,
    )


def _named_turn(body: Json) -> str | None:
    """A turn that a Responses request refers to instead of repeating it."""
    items = body.get("input")
    refers = [i.get("id") for i in items if _is_reference(i)] if isinstance(items, list) else []
    named = (turn_of(item_id) for item_id in (body.get("previous_response_id"), *refers))
    return next((turn_id for turn_id in named if turn_id is not None), None)


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _earlier(live: LiveTrajectory | None, turn_id: str) -> EarlierTurn | None:
    contents = None if live is None else live.contents
    turn = None if contents is None else contents.tree.by_id(turn_id)
    if contents is None or turn is None:
        return None
    return EarlierTurn(turn.messages, contents.requests.get(turn_id, {}), turn.reply)


def _headers(
    live: LiveTrajectory, running: InFlightCall, turns: list[CompletedTurn] | None
) -> dict[str, str]:
    """What a reply says beside its body. The policy version is known once the turn is done."""
    headers = {
        "x-rollbook-trajectory-id": live.opened.trajectory_id,
        "x-rollbook-turn-id": ",".join(turn.turn_id for turn in running.turns),
    }
    not_honoured = running.turns[0].requested.honoured
    if not_honoured:
        # Field names are the client's: quoted, whatever they hold is a valid header.
        told = ",".join(quote(name) for name in not_honoured)
        headers["x-rollbook-not-honoured"] = told if len(told) <= NAMED else told[:NAMED] + "..."
    if live.opened.split == QUARANTINE:
        headers["x-rollbook-quarantined"] = quote(live.opened.name)
    if turns is not None and turns[0].completed.policy_version is not None:
        headers["x-rollbook-policy-version"] = str(turns[0].completed.policy_version)
    return headers
