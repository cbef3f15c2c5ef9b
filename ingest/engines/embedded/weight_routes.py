"""SGLang's routes that change an engine's weights and verify them, over the embedded engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from rollbook.ingest.engines.embedded.held_weights import HeldWeights
from rollbook.ingest.engines.embedded.weight_control import WeightControl
from rollbook.ingest.engines.weights.name import version_in
from rollbook.store.errors import ModelError, RequestError
from rollbook.store.events import Json

NOT_SERVED = (
    "init_weights_update_group",
    "destroy_weights_update_group",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
)


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk; SGLang's other fields are accepted."""

    model_config = ConfigDict(extra="allow")
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateFromTensors(BaseModel):
    """Body of /update_weights_from_tensor; SGLang's other fields are accepted."""

    model_config = ConfigDict(extra="allow")
    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateWeightVersion(BaseModel):
    """Body of /update_weight_version."""

    model_config = ConfigDict(extra="allow")
    new_version: str
    abort_all_requests: bool = True


class CheckWeights(BaseModel):
    """Body of /weights_checker."""

    model_config = ConfigDict(extra="allow")
    action: str = "checksum"


def refused(error: Exception) -> JSONResponse:
    """An update that did not happen, in SGLang's form and in the proxy's."""
    shown = {"message": str(error), "type": "invalid_request_error", "param": None, "code": "update_failed"}
    return JSONResponse({"success": False, "message": str(error), "error": shown}, 400)


def add_weight_routes(routes: APIRouter, weights: HeldWeights, updates: WeightControl) -> None:
    """The routes that change weights, and the one that says which are there."""
    _add_disk_route(routes, weights, updates)
    _add_session_routes(routes, updates)
    _add_version_route(routes, updates)

    @routes.api_route("/weights_checker", methods=["GET", "POST"], response_model=None)
    async def weights_checker(body: CheckWeights | None = None) -> Json | JSONResponse:
        if body is not None and body.action != "checksum":
            return refused(ModelError(f"action is {body.action!r}: this engine computes only checksum"))
        rank = _rank(await updates.checksums())
        engine = hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()
        found: Json = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine}
        return found | {"digest": weights.digest if weights.state in ("whole", "unnamed") else None}

    async def not_served(request: Request) -> JSONResponse:
        name = request.url.path.rpartition("/")[2]
        return refused(ModelError(f"{name}: the embedded engine loads weights from disk or from tensors"))

    for name in NOT_SERVED:
        routes.add_api_route(f"/{name}", not_served, methods=["POST"], response_model=None)


def _add_disk_route(routes: APIRouter, weights: HeldWeights, updates: WeightControl) -> None:
    @routes.post("/update_weights_from_disk", response_model=None)
    async def update_from_disk(body: UpdateFromDisk) -> Json | JSONResponse:
        path, version = Path(body.model_path), _maybe_version(body.weight_version)
        try:
            digest = await updates.update_from_disk(path, version, flush=body.flush_cache)
        except ModelError as error:
            return refused(error)
        version = weights.version if weights.named else None
        message = f"serving {body.model_path} as version {version}"
        return {"success": True, "message": message, "num_paused_requests": 0, "digest": digest}


def _add_version_route(routes: APIRouter, updates: WeightControl) -> None:
    @routes.post("/update_weight_version", response_model=None)
    async def update_weight_version(body: UpdateWeightVersion) -> Json | JSONResponse:
        version = _version(body.new_version)
        if body.abort_all_requests:
            updates.abort_all()
        try:
            await updates.name(version, body.new_version)
        except ModelError as error:
            return refused(error)
        message = f"Weight version updated to {version}"
        return {"success": True, "message": message, "new_version": body.new_version}


def _add_session_routes(routes: APIRouter, updates: WeightControl) -> None:
    @routes.post("/begin_weight_update", response_model=None)
    async def begin() -> Json | JSONResponse:
        try:
            await updates.begin_update()
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}

    @routes.post("/update_weights_from_tensor", response_model=None)
    async def update_from_tensors(body: UpdateFromTensors) -> Json | JSONResponse:
        version = _maybe_version(body.weight_version)
        try:
            if body.load_format is not None:
                raise ModelError(f"load_format is {body.load_format!r}: this engine reads null only")
            sent = body.serialized_named_tensors
            await updates.update_from_tensors(sent, version, flush=body.flush_cache)
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}

    @routes.post("/end_weight_update", response_model=None)
    async def end() -> Json | JSONResponse:
        try:
            await updates.end_update()
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}


def _rank(checksums: dict[str, str]) -> Json:
    """The one rank's part of an answer of /weights_checker."""
    names = b"".join(name.encode() + checksums[name].encode() for name in sorted(checksums))
    sizes = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    return {
        "checksums": checksums,
        "per_gpu_checksum": hashlib.sha256(names).hexdigest(),
        "parallelism_info": [{"role": "target"} | sizes | {"rank": 0, "size": 1}],
    }


def _version(text: str) -> int:
    version = version_in(text)
    if version is None:
        message = f"weight_version {text!r} names no policy version: send one as N or run/policy/N/MARK"
        raise RequestError(400, "bad_version", message)
    return version


def _maybe_version(text: str | None) -> int | None:
    return None if text is None else _version(text)
