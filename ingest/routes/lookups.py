"""What agents look up beside completions: models, earlier responses, how long a prompt is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.bounds import run_by_size
from rollbook.ingest.endpoints.api import AgentApi, ResponseIds
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.fields import SamplingFields, json_object
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.routes.resolver import RequestResolver
from rollbook.ingest.turns.model_call import ModelCall, check_call
from rollbook.store.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class LookupRoutes:
    """Answers what asks for no completion.

    Attributes:
        model_name: the model's own name; requests may use any.
    """

    turn_runner: TurnRunner
    resolver: RequestResolver
    room: BodyBudget
    model_name: str

    def add(self, app: FastAPI) -> None:
        """Add the routes, each with a trajectory in front of it and without."""
        for prefix in ("", "/t/{said:path}"):
            for path, api in APIS.items():
                if api.count is not None:
                    count = partial(self.count, api=api)
                    app.add_route(f"{prefix}{path}/count_tokens", count, methods=["POST"])
                if api.ids is not None:
                    response = partial(self.response, api=api, ids=api.ids)
                    app.add_route(f"{prefix}{path}/{{response_id}}", response, methods=["GET"])
            app.add_route(prefix + "/v1/models", self.models, methods=["GET"])
            app.add_route(prefix + "/v1/models/{model:path}", self.models, methods=["GET"])

    async def count(self, request: Request, *, api: AgentApi) -> Response:
        """How many tokens a message's prompt would hold."""
        self.resolver.address(request)
        async with self.room.plain(request) as raw:
            return JSONResponse({"input_tokens": await run_by_size(len(raw), self._prompt_length, api, raw)})

    def _prompt_length(self, api: AgentApi, raw: bytes) -> int:
        assert api.count is not None
        call = api.count(json_object(raw))
        check_call(call, len(raw), self.resolver.settings.max_body_bytes)
        tokenizer = self.turn_runner.bridges.tokenizer
        text = tokenizer.render(call.messages, call.tools, generate=True, **call.template_kwargs)
        return len(tokenizer.encode(text))

    async def response(self, request: Request, *, api: AgentApi, ids: ResponseIds) -> Response:
        """An earlier response, from the log."""
        recorder = self.resolver.recorder
        identity = self.resolver.identity(self.resolver.address(request), request, {})
        response_id = request.path_params["response_id"]
        turn_id = ids.turn_of(response_id)
        if turn_id is not None:
            await self.resolver.ensure_local(request, identity.name, [response_id], b"", kept=False)
        live = None if turn_id is None else recorder.of_turn(turn_id)
        other = live is not None and identity.explicit and identity.name != live.opened.name
        if live is None or turn_id is None or other:
            text = f"no response {response_id!r} in an open trajectory"
            raise RequestError(404, "unknown_response", text)
        turns = await recorder.answered(live, (turn_id,))
        asked = turns[0].requested
        fields = SamplingFields.model_validate({"model": asked.requested_model})
        call = ModelCall(asked.wire.get("endpoint", ""), [], None, fields, asked.request)
        return JSONResponse(api.reply(call, turns, self.turn_runner.bridges.tokenizer))

    async def models(self, request: Request) -> Response:
        """The model that is served."""
        self.resolver.address(request)
        tokenizer, version = self.turn_runner.bridges.tokenizer, self.turn_runner.engine.policy_version()
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "rollbook"}
        model |= {"policy_version": version, "max_model_len": tokenizer.context_length}
        if "model" in request.path_params:
            return JSONResponse(model | {"id": request.path_params["model"]})
        return JSONResponse({"object": "list", "data": [model], "first_id": None, "has_more": False})
