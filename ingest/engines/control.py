"""SGLang's own control routes over the embedded engine, served under `/engine` on loopback only."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict

from rollbook.ingest.engines.engine import Generation, Prompt, Sampling
from rollbook.ingest.requests import Temperature
from rollbook.store.errors import ModelError, RequestError
from rollbook.store.events import Json, token_ids


class Controlled(Protocol):
    """What these routes need of an engine."""

    path: Path
    weights_digest: str
    vocabulary: int
    context_length: int

    def policy_version(self) -> int | None: ...
    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def update_weights(self, path: Path, version: int | None) -> str: ...


class UpdateWeights(BaseModel):
    """Body of /update_weights_from_disk; SGLang's other fields are accepted."""

    model_config = ConfigDict(extra="allow")
    model_path: str
    weight_version: str | None = None


class SamplingParams(BaseModel):
    """SGLang's sampling_params, as far as the embedded engine acts on them."""

    model_config = ConfigDict(extra="allow")
    max_new_tokens: int = 128
    temperature: Temperature = 1.0
    sampling_seed: int = 0


class GenerateBody(BaseModel):
    """Body of /generate."""

    model_config = ConfigDict(extra="allow")
    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()


def _check(body: GenerateBody, engine: Controlled) -> None:
    """Refuse what would end the generation loop, and every request with it."""
    ids, new = body.input_ids, body.sampling_params.max_new_tokens
    if not ids or min(ids) < 0 or max(ids) >= engine.vocabulary:
        text = f"input_ids must hold at least one id, each from 0 to {engine.vocabulary - 1}"
        raise RequestError(400, "bad_request", text)
    if new < 1 or len(ids) + new > engine.context_length:
        text = f"max_new_tokens is {new}: send at least 1, and with {len(ids)} input_ids at most "
        raise RequestError(400, "bad_request", text + f"{engine.context_length} in all")


def loopback_only(request: Request) -> None:
    """Refuse control from other hosts.

    Raises:
        RequestError: 403.
    """
    host = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise RequestError(403, "loopback_only", "/engine is served to this host only")


def control_routes(engine: Controlled) -> APIRouter:
    """The routes, to be mounted under /engine."""
    routes = APIRouter(dependencies=[Depends(loopback_only)])

    @routes.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> Json:
        return {"model_path": str(engine.path), "weight_version": str(engine.policy_version())}

    @routes.post("/generate")
    async def generate(body: GenerateBody) -> Json:
        _check(body, engine)
        params = body.sampling_params
        sampling = Sampling(params.max_new_tokens, params.temperature, params.sampling_seed)
        made = await engine.generate(Prompt(token_ids(body.input_ids), (), None), sampling)
        return _generated(made, len(body.input_ids))

    _add_weight_routes(routes, engine)
    _add_flow_routes(routes, engine)
    return routes


def _add_weight_routes(routes: APIRouter, engine: Controlled) -> None:
    @routes.post("/update_weights_from_disk")
    async def update_weights(body: UpdateWeights) -> Json:
        version = None if body.weight_version is None else _version(body.weight_version)
        try:
            digest = await engine.update_weights(Path(body.model_path), version)
        except ModelError as error:
            raise RequestError(400, "update_failed", str(error)) from error
        message = f"serving {body.model_path} as version {engine.policy_version()}"
        return {"success": True, "message": message, "num_paused_requests": 0, "digest": digest}

    @routes.get("/weights_checker")
    @routes.post("/weights_checker")
    async def weights_checker() -> Json:
        return {"success": True, "digest": engine.weights_digest}


def _add_flow_routes(routes: APIRouter, engine: Controlled) -> None:
    @routes.post("/pause_generation")
    async def pause() -> Json:
        await engine.pause()
        return {"status": "paused"}

    @routes.post("/continue_generation")
    async def resume() -> Json:
        await engine.resume()
        return {"status": "running"}

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush() -> Json:
        await engine.flush_cache()
        return {"success": True}


def _generated(made: Generation, prompt_tokens: int) -> Json:
    """A generation in SGLang's form."""
    ids = made.completion_ids.tolist()
    numbers = [] if made.logprobs is None else made.logprobs.tolist()
    spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in made.version_spans]
    reason: Json = {"type": made.finish_reason}
    reason |= {"matched": ids[-1]} if made.finish_reason == "stop" else {"length": len(ids)}
    meta = {
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[p, i, None] for p, i in zip(numbers, ids, strict=True)],
        "weight_versions": spans,
        "weight_version": spans[-1]["version"],
    }
    return {"output_ids": ids, "meta_info": meta}


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        message = f"weight_version {text!r} is not a policy version: send a non-negative integer"
        raise RequestError(400, "bad_version", message)
    return int(text)
